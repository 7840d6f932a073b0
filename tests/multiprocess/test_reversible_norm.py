"""A norm that keeps statistics in attributes from its first call to its second, which is in another stage."""

from bapipe.training.launch.processes import launch
from tests.models.reversible_norm import LAYERS
from tests.multiprocess.reversible_norm_cases import Case, Outcome, run_cases

TWO = (
    Case(schedule="gpipe", cuts=(2,)),
    Case(schedule="1f1b", cuts=(3,), affine=False),
    Case(schedule="1f1b", cuts=(1,), subtract_last=True, recompute=(0, 1)),
    Case(schedule="zb-h1", cuts=(2,), detached=False),
    Case(schedule="zb-h1", cuts=(4,), follows_sizes=True, recompute=(0, 1)),
)
THREE = (
    Case(schedule="gpipe", cuts=(1, 3), affine=False, subtract_last=True, recompute=(0,)),
    Case(schedule="1f1b", cuts=(2, 3), follows_sizes=True),
    Case(schedule="1f1b", cuts=(1, 4), detached=False, recompute=(0, 1, 2)),
    Case(schedule="zb-h1", cuts=(2, 4)),
)


def _check(cases: tuple[Case, ...]) -> None:
    ranks: list[list[Outcome]] = launch(
        run_cases, [f"cpu{i}" for i in range(len(cases[0].cuts) + 1)], cases, timeout_s=120
    )
    for case, *outcomes in zip(cases, *ranks, strict=True):
        for outcome in outcomes:
            assert list(outcome.layers) == LAYERS, case
            assert max(outcome.loss, outcome.gradient, outcome.parameter) <= 1e-10, case
        # Weight and bias of each of the four linear layers once, and those of the norm in both of their stages.
        assert sum(outcome.num_gradients for outcome in outcomes) == 2 * 4 + 4 * case.affine, case


def test_two_stages_train_as_the_whole_model() -> None:
    _check(TWO)


def test_three_stages_train_as_the_whole_model() -> None:
    _check(THREE)
