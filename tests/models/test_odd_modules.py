"""Models with one oddity each train in stages as they do whole, or are refused in one line; none trains wrongly."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.schedules import SCHEDULES
from bapipe.schedules.table import is_ready
from bapipe.tracing.layers import trace
from tests.models.odd_modules import ODD, scores_loss
from tests.models.random_partitions import random_stages
from tests.multiprocess.runtime_cases import make_plan_of

NUM_MICROBATCHES, SIZE = 3, 3

REFUSED = {
    "nested ClampedWeight recomputed": "changes the parameter '2.first.weight' of layer '2.first'",
    "nested NormalisedWeight recomputed": "changes the parameter '2.second.weight' of layer '2.second'",
    "nested ClampedWithoutLayer recomputed": "changes the parameter '2.scale' of layer '2'",
    "nested LateChange recomputed": "changes the parameter '2.second.weight' of layer '2",
    "rooted LateChange recomputed": "changes the parameter 'second.weight' of layer 'second'",
    "nested LimitedNorms recomputed": "changes the parameter '2.kinds.weight' of layer '2.kinds'",
    "nested KeptTensor recomputed": "because a forward keeps values: plan without recomputation",
    "nested KeptObject recomputed": "because a forward keeps values: plan without recomputation",
    "nested GradientInside recomputed": "plan without recomputation",
    "rooted OwnForwardHook": "has a hook on itself",
    "rooted AssignedBuffer": "its forward assigns the buffer 'mean'",
    "rooted Counter": "its forward keeps state from call to call",
    "rooted KeptObject": "keeps values between calls, which tracing does not see",
    "rooted KeptList": "its forward keeps state from call to call",
    "rooted LayerDrop": "its forward draws random numbers in Python",
}
"""What is refused, and a part of the line; `recomputed` only if its stage is."""

MAY_BE_REFUSED = {
    "nested NormalisedWeight": "modified by an inplace operation",
    "nested BatchBranch": "would not train as the module does",
    "nested RecordingHook": "the list '2.kept' would grow with each micro-batch",
    "nested Nonzero": "whose size depends on the data cannot cross a cut",
    "nested Mapped": "may have escaped from inside a function being vmapped",
    "rooted Selected": "whose size depends on the data cannot cross a cut",
    "Packed": "cannot be traced",
    "Starred": "the model takes 1 inputs",
}
"""What some cuts or versions refuse."""

DRAWING = {"nested LayerDrop", "nested TensorLayerDrop", "nested FixedNoise"}
"""Their random numbers are the pipeline's own, so that only pipelines can be compared with one another."""


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ODD[name].make().train()


def _order(schedule: str, num_stages: int) -> list[str]:
    """Returns a schedule's actions in an order in which one rank can run all stages."""
    table = SCHEDULES[schedule](num_stages, NUM_MICROBATCHES)
    todo = [list(actions) for actions in table.order]
    done: set[object] = set()
    order: list[str] = []
    while any(todo):
        for actions in todo:
            if actions and is_ready(actions[0], num_stages, done):  # type: ignore[arg-type]
                done.add(actions[0])
                order.append(str(actions.pop(0)))
    return order


def _batches(name: str) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    torch.manual_seed(1)
    rows = NUM_MICROBATCHES * SIZE
    return [(ODD[name].data(rows), torch.randint(0, 5, (rows,))) for _ in range(2)]


Seen = list[tuple[float, dict[str, Tensor | None], dict[str, Tensor]]]


def _in_stages(name: str, schedule: str, recompute: bool) -> Seen:
    batches = _batches(name)
    stages = random_stages(trace(_made(name), batches[0][0]), 2, random.Random(len(name)))
    ranks = range(len(stages)) if recompute else ()
    plan = make_plan_of(stages, [0] * len(stages), [_order(schedule, len(stages))], SIZE, NUM_MICROBATCHES, ranks)
    inputs = [x[:1] for x in batches[0][0]]
    pipeline = Pipeline(_made(name), plan, loss=scores_loss, inputs=inputs, optimizer=sgd(0.1))
    seen: Seen = []
    for given, target in batches:
        loss = pipeline.step(*given, target=target)
        assert loss is not None
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in pipeline.named_parameters().items()}
        seen.append((loss, grads, {n: t.clone() for n, t in pipeline.state_dict().items()}))
    return seen


def _whole(name: str) -> Seen:
    module = _made(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    seen: Seen = []
    for given, target in _batches(name):
        optimizer.zero_grad()
        total = 0.0
        for m in range(NUM_MICROBATCHES):
            own = module(*(x.chunk(NUM_MICROBATCHES)[m] for x in given))
            loss = scores_loss(own, target.chunk(NUM_MICROBATCHES)[m]) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        seen.append((total, grads, {n: t.clone() for n, t in module.state_dict().items()}))
    return seen


def _check_equal(got: Seen, want: Seen) -> None:
    for (loss, grads, state), (other, other_grads, other_state) in zip(got, want, strict=True):
        assert loss == pytest.approx(other, abs=1e-12)
        for name, grad in grads.items():
            assert (grad is None) == (other_grads[name] is None), name
            if grad is not None:
                torch.testing.assert_close(grad, other_grads[name], rtol=1e-12, atol=1e-12)
        assert set(state) == set(other_state)
        for name, value in state.items():
            torch.testing.assert_close(value, other_state[name], rtol=1e-12, atol=1e-12)


def _expected(name: str, recompute: bool) -> Sequence[str]:
    texts = [REFUSED.get(name), MAY_BE_REFUSED.get(name), REFUSED.get(f"{name} recomputed") if recompute else None]
    return [text for text in texts if text is not None]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [name for name in ODD if name not in DRAWING])
def test_stages_train_as_the_whole_model_or_are_refused(name: str) -> None:
    want = None
    for schedule, recompute in (("1f1b", False), ("zb-h1", True)):
        expected = _expected(name, recompute)
        refusal, got = "", None
        try:
            got = _in_stages(name, schedule, recompute)
        except BapipeError as error:
            refusal = str(error)
        if got is None:
            assert any(text in refusal for text in expected), refusal
            assert "\n" not in refusal
            continue
        assert REFUSED.get(name) is None
        want = _whole(name) if want is None else want
        _check_equal(got, want)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", sorted(DRAWING))
def test_random_numbers_depend_neither_on_the_schedule_nor_on_recomputation(name: str) -> None:
    state = random.getstate()
    _check_equal(_in_stages(name, "zb-h1", True), _in_stages(name, "1f1b", False))
    assert random.getstate() == state


def test_modules_that_a_graph_cannot_keep_say_why() -> None:
    names = "ContainerBackwardHook", "AveragedBuffer", "AssignedBuffer", "Counter", "LayerDrop"
    traced = {name: trace(_made(f"nested {name}"), [torch.zeros(2, 6, dtype=torch.float64)]) for name in names}
    reasons = {
        name: {path: reason.text for path, reason in model.leaf_reasons.items()} for name, model in traced.items()
    }
    assert reasons == {
        "ContainerBackwardHook": {"2.inner": "it has a hook of 'tests.models.odd_modules'"},
        "AveragedBuffer": {"2": "its forward changes '2.mean'"},
        "AssignedBuffer": {"2": "its forward assigns the buffer 'mean'"},
        "Counter": {"2": "its forward keeps state from call to call"},
        "LayerDrop": {"2": "its forward draws random numbers in Python"},
    }
