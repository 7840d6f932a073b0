"""Micro-batches count by their targets that are not ignored, so that they train as the whole mini-batch does."""

import copy
from collections.abc import Callable
from functools import partial
from math import isnan, log
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import bapipe
from bapipe.equivalence.outcome import Loss
from bapipe.equivalence.sample_dims import BY_ROWS
from bapipe.equivalence.target_weights import WeightsAhead, weighted_loss
from bapipe.errors import BapipeError, LayerFailed
from bapipe.runtime.loss_weights import LossWeights
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.rng import PerOperatorRng
from bapipe.torch_private.tensors import FakeTensor
from bapipe.training.evaluate.evaluate import EvaluationData, evaluate
from bapipe.zoo.data.dataset import as_pipeline_dataset
from tests.equivalence.test_losses import Focal, of_words
from tests.multiprocess.runtime_cases import make_plan

CPU = torch.device("cpu")
IGNORED = 3
CLASSES = torch.tensor([0.5, 2.0, 3.0, 9.0]).double()


class Reshaped(nn.CrossEntropyLoss):
    """Cross entropy of what it reshapes, with the state of a counter."""

    calls = 0

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(scores.flatten(0, -2), target.to(scores.device).flatten())


class Drawing(nn.Module):
    """Leaves out a third of the targets, and notes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        self.drawn.append(torch.where(torch.rand(target.shape) < 1 / 3, -100, target))
        return functional.cross_entropy(scores * 2, self.drawn[-1])


def sum_of_means(scores: Tensor, target: Tensor) -> Tensor:
    """Of two means over unlike targets, and one over samples, as language models are trained for several tasks."""
    words = functional.cross_entropy(scores, target, ignore_index=IGNORED)
    sentences = bapipe.weighted_mean(scores.square().mean(1), target != 1)
    words += scores[:, 0].square().mean()
    return 0.5 * (words + sentences / 4)


class FromOne(Reshaped):
    """Takes classes from one on, and changes its target."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        target -= 1
        return super().forward(scores, target)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute", [(), (1,)])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=IGNORED),
        nn.CrossEntropyLoss(CLASSES, ignore_index=IGNORED),
        nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 3.0, 0.0]).double()),  # nothing to learn, without being ignored
        nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 3.0, 0.1]).double(), label_smoothing=0.2),
        partial(functional.cross_entropy, weight=torch.tensor([0.5, 2.0, 3.0, 0.0]).double()),
        partial(functional.cross_entropy, ignore_index=IGNORED, reduction="mean"),
        Focal(CLASSES, ignore_index=IGNORED),  # a mean over samples
        Reshaped(CLASSES, ignore_index=IGNORED),
        lambda scores, target: functional.nll_loss(scores.log_softmax(1), target, ignore_index=IGNORED),
        lambda scores, target: functional.cross_entropy(scores, target.masked_fill(target == IGNORED, -100)),
        lambda scores, target: bapipe.weighted_mean(scores.square().mean(1), target != IGNORED),
        lambda scores, target: bapipe.weighted_mean(
            scores.square(), CLASSES[target, None] * (target != IGNORED)[:, None]
        ),
        lambda scores, target: functional.cross_entropy(scores, target) * 2,  # ignores nothing, so all count alike
        lambda scores, target: sum_of_means(scores, target),
    ],
)
def test_a_mean_over_targets_is_that_of_the_mini_batch(loss: Loss, recompute: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).double()
    part = copy.deepcopy(whole)
    x = torch.randn(6, 6, dtype=torch.float64)
    target = torch.tensor([0, 1, 2, IGNORED, IGNORED, IGNORED])  # the last micro-batch has nothing to learn
    order = [["0F0", "1F0", "0F1", "1F1", "0F2", "1F2", "1B0", "0B0", "1B1", "0B1", "1B2", "0B2"]]
    plan = make_plan(["0", "1"], (1,), (0, 0), order, 2, 3, recompute)
    pipeline = Pipeline(part, plan, loss=loss, inputs=[x], optimizer=sgd(0.1))
    got = pipeline.step(x, target=target)
    want = loss(whole(x), target)
    want.backward()
    assert got == pytest.approx(want.item(), abs=1e-6)  # the pipeline adds losses up in float32
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("num_samples", [6, 5])
def test_evaluation_is_the_mean_over_all_targets(num_samples: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4))
    loss = nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 3.0, 9.0]), ignore_index=IGNORED)
    x, target = torch.randn(6, 6), torch.tensor([0, IGNORED, IGNORED, IGNORED, 2, 1])
    order = [["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]]
    pipeline = Pipeline(module, make_plan(["0"], (), (0,), order, 2, 3), loss=loss, inputs=[x], evaluates=True)
    x, target = x[:num_samples], target[:num_samples]
    got = pipeline.evaluate(x, target=target, num_samples=num_samples)
    assert got is not None
    assert got.loss == pytest.approx(loss(module(x), target).item(), rel=1e-6)
    assert got.loss_weight == {6: 5.5, 5: 3.5}[num_samples]
    nothing = pipeline.evaluate(x, target=torch.full_like(target, IGNORED), num_samples=num_samples)
    assert nothing is not None
    assert nothing.loss is not None
    assert isnan(nothing.loss)


def centred(scores: Tensor, target: Tensor) -> Tensor:
    """The mean of what is left of scores without their mean over some samples, which is no term of the loss."""
    center = bapipe.weighted_mean(scores, (target != IGNORED)[:, None])
    return (scores - center).square().mean()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "loss",
    [
        centred,
        lambda scores, target: functional.cross_entropy(scores, target, ignore_index=IGNORED).exp(),
        lambda scores, target: (
            functional.cross_entropy(scores, target, ignore_index=IGNORED)
            * functional.cross_entropy(-scores, target, ignore_index=IGNORED)
        ),
        lambda scores, target: 1 / functional.cross_entropy(scores, target, ignore_index=IGNORED),
        lambda scores, target: (  # a sum by a number of samples: the share is another in each micro-batch
            functional.cross_entropy(scores, target, ignore_index=IGNORED) * (target != IGNORED).float().mean()
        ),
        lambda scores, target: (
            functional.cross_entropy(scores, target, ignore_index=IGNORED) * ((target != IGNORED).sum().item() / 2)
        ),
    ],
)
def test_means_that_are_no_terms_count_as_they_are(loss: Loss) -> None:
    torch.manual_seed(0)
    module, x, target = nn.Sequential(nn.Linear(6, 4)), torch.randn(4, 6), torch.tensor([0, IGNORED, 1, 2])
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), check=False)
    parts = [loss(module(part), rows).item() for part, rows in zip(x.chunk(2), target.chunk(2), strict=True)]
    assert pipeline.step(x, target=target) == pytest.approx(sum(parts) / 2, rel=1e-6)


@pytest.mark.usefixtures("alone")
def test_noted_means_keep_their_values() -> None:
    noted: list[float] = []

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        accuracy = bapipe.weighted_mean((scores.argmax(1) == target).float(), target != IGNORED)
        if not isinstance(accuracy, FakeTensor):
            noted.append(float(accuracy))
        return sum_of_means(scores, target)

    torch.manual_seed(0)
    module, x, target = nn.Sequential(nn.Linear(6, 4)), torch.randn(4, 6), torch.tensor([0, IGNORED, 1, 2])
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), check=False)
    got = pipeline.step(x, target=target)
    assert got == pytest.approx(sum_of_means(module(x), target).item(), rel=1e-6)
    right = (module(x).argmax(1) == target).float()
    assert noted[:2] == pytest.approx([right[0].item(), right[2:].mean().item()])


def of_single_samples(scores: Tensor, target: Tensor) -> Tensor:
    """Each sentence counts alike, however long it is."""
    pairs = zip(scores, target, strict=True)
    return sum(functional.cross_entropy(own, words) for own, words in pairs) / len(target)  # type: ignore[return-value]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_means_of_single_samples_and_in_checkpoints_are_exact(size: int, reentrant: bool | None) -> None:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        if reentrant is None:
            return of_single_samples(scores, target)
        words: Tensor = checkpoint(of_words, scores, target, use_reentrant=reentrant)
        return words * 2

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).double()
    part, x = copy.deepcopy(whole), torch.randn(4, 3, 6, dtype=torch.float64)
    target = torch.tensor([[0, 1, 2], [3, -100, 1], [-100, -100, 2], [1, 1, 0]])
    num = 4 // size
    forwards = [f"{s}F{m}" for m in range(num) for s in (0, 1)]
    backwards = [f"{s}B{m}" for m in range(num) for s in (1, 0)]
    plan = make_plan(["0", "1"], (1,), (0, 0), [[*forwards, *backwards]], size, num)
    pipeline = Pipeline(part, plan, loss=loss, inputs=[x], optimizer=sgd(0.1))
    got, want = pipeline.step(x, target=target), loss(whole(x), target)
    want.backward()
    assert got == pytest.approx(want.item(), abs=1e-6)
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("alone")
def test_no_step_decides_for_later_ones() -> None:
    """Two means, one or none: as each mini-batch has targets for them."""

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        value = scores.sum() * 0.0
        for one in (0, 1):
            known = (target != IGNORED) if one == 0 else (target == 1)
            if known.any():
                value = value + functional.cross_entropy(scores[known], target[known])
        return value

    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(4, 6)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), check=False)
    for labels in ([3, 3, 3, 3], [1, 1, 2, 1], [0, 3, 2, 0], [1, 3, 2, 1]):
        target = torch.tensor(labels)
        assert pipeline.step(x, target=target) == pytest.approx(loss(module(x), target).item(), rel=1e-6)


@pytest.mark.usefixtures("alone")
def test_a_sum_of_means_of_which_one_has_no_targets_is_evaluated() -> None:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        rare = target.masked_fill(target != 1, -100)
        return functional.cross_entropy(scores, target) + functional.cross_entropy(-scores, rare)

    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(4, 6)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), evaluates=True)
    found = pipeline.evaluate(x, target=torch.tensor([0, 1, 2, 0]))
    assert found is not None
    assert found.loss is not None
    assert not isnan(found.loss)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (lambda scores, target: guarded(scores, target), 1.0),
        (lambda scores, target: guarded(scores, target) + scores.square().mean(), 4.0),
    ],
)
def test_micro_batches_with_nothing_to_learn_count_nothing_in_an_evaluation(loss: Loss, weight: float) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(4, 6)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], evaluates=True, check=False)
    target = torch.tensor([IGNORED, IGNORED, 1, IGNORED])
    found = pipeline.evaluate(x, target=target)
    parts = [loss(module(part), rows).item() for part, rows in zip(x.chunk(2), target.chunk(2), strict=True)]
    assert found is not None
    assert found.loss_weight == weight
    assert found.loss == pytest.approx(parts[1] if weight == 1 else sum(parts) / 2, rel=1e-6)


@pytest.mark.usefixtures("alone")
def test_mini_batches_with_nothing_to_learn_count_nothing_in_an_evaluation() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(12, 6)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=guarded, inputs=[x[:4]], evaluates=True, check=False)
    target = torch.tensor([1, IGNORED, 2, 0] + 4 * [IGNORED] + [0] + 3 * [IGNORED])  # mini-batches of 4
    data = EvaluationData(
        dataset=as_pipeline_dataset(TensorDataset(x, target)),
        metrics={"rows": lambda o, t: t != IGNORED},
        generation=None,
    )
    found = evaluate(pipeline, plan, data, torch.device("cpu"), 0, lambda _: None)
    assert found.loss == pytest.approx(functional.cross_entropy(module(x), target, ignore_index=IGNORED).item())
    assert found.metrics == (("rows", 4 / 12),)


@pytest.mark.usefixtures("alone")
def test_class_weights_may_be_others_in_every_step() -> None:
    torch.manual_seed(0)
    module, loss = nn.Sequential(nn.Linear(6, 4)), nn.CrossEntropyLoss(torch.ones(4))
    x, target = torch.randn(4, 6), torch.tensor([0, 0, 1, 2])
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), evaluates=True)
    for weight in (torch.tensor([1.0, 2.0, 3.0, 4.0]), None, torch.tensor([3.0, 1.0, 0.5, 1.0])):
        loss.weight = weight
        want = loss(module(x), target).item()
        assert pipeline.step(x, target=target) == pytest.approx(want, rel=1e-6)
        evaluated = pipeline.evaluate(x, target=target)
        assert evaluated is not None
        assert evaluated.loss == pytest.approx(want, rel=1e-6)


@pytest.mark.usefixtures("alone")
def test_a_loss_that_runs_ahead_of_the_outputs_keeps_its_state_and_the_targets() -> None:
    loss = FromOne(CLASSES.float(), ignore_index=IGNORED)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    module, x, target = nn.Sequential(nn.Linear(6, 4)), torch.randn(4, 6), torch.tensor([0, IGNORED, 1, 2])
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0))
    want = functional.cross_entropy(module(x), target, CLASSES.float(), ignore_index=IGNORED).item()
    assert pipeline.step(x, target=target + 1) == pytest.approx(want, rel=1e-6)
    assert loss.calls == 2


@pytest.mark.usefixtures("alone")
def test_targets_that_a_draw_leaves_out_do_not_count() -> None:
    """It is weighted before its forward, which draws the same; in one step other draws may leave out as many."""
    loss = Drawing()
    torch.manual_seed(0)
    module, x, target = nn.Sequential(nn.Linear(6, 4)), torch.randn(8, 6), torch.randint(0, 4, (8,))
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 4, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), check=False)
    unlike = 0
    for _ in range(6):
        got = pipeline.step(x, target=target)
        drawn = loss.drawn[-2:]
        unlike += len({int((labels == -100).sum()) for labels in drawn}) == 2
        assert got == pytest.approx(functional.cross_entropy(module(x) * 2, torch.cat(drawn)).item(), rel=1e-6)
    assert unlike > 0


@pytest.mark.usefixtures("alone")
def test_where_the_output_chooses_the_targets_all_micro_batches_count_alike() -> None:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(scores, target.masked_fill(scores.detach()[:, 0] > 0, -100))

    torch.manual_seed(0)
    module, x, target = nn.Sequential(nn.Linear(6, 4)), torch.randn(8, 6), torch.randint(0, 4, (8,))
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 4, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0))
    parts = [loss(module(part), rows).item() for part, rows in zip(x.chunk(2), target.chunk(2), strict=True)]
    assert pipeline.step(x, target=target) == pytest.approx(sum(parts) / 2, rel=1e-6)


def guarded(scores: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, and zero where a micro-batch has nothing to learn."""
    if not (target != IGNORED).any():
        return scores.sum() * 0.0
    return functional.cross_entropy(scores, target, ignore_index=IGNORED)


def masked(scores: Tensor, target: Tensor) -> Tensor:
    mask = target != IGNORED
    return functional.cross_entropy(scores[mask], target[mask])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (guarded, torch.float64),
        (masked, torch.float64),
        (lambda s, t: bapipe.weighted_mean(s.square().mean(1), t != IGNORED), torch.float64),
        (lambda s, t: functional.cross_entropy(s, t, ignore_index=IGNORED).float().mean(), torch.bfloat16),
        (lambda s, t: functional.cross_entropy(s, t, ignore_index=IGNORED) / 2.0 * 3, torch.float64),
    ],
)
def test_some_micro_batches_or_all_may_have_nothing_to_learn(loss: Loss, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 4)).to(dtype)
    part, x = copy.deepcopy(whole), torch.randn(4, 6, dtype=dtype)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(part, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), check=False)
    for target in (torch.tensor([0, IGNORED, 1, 2]), torch.tensor([IGNORED, IGNORED, 1, 2])):
        got, want = pipeline.step(x, target=target), loss(whole(x), target)
        assert got == pytest.approx(want.item(), rel=1e-2 if dtype == torch.bfloat16 else 1e-6)
        whole.zero_grad()
        want.backward()
        torch.testing.assert_close(pipeline.named_parameters()["0.weight"].grad, whole[0].weight.grad)
    pipeline.step(x, target=torch.full_like(target, IGNORED))
    if loss is not masked:  # the mean of nothing has no gradients
        gradient = pipeline.named_parameters()["0.weight"].grad
        assert gradient is not None
        assert not gradient.any()


def two_micro_batches(
    loss: Loss, num_steps: int, target: Tensor, num_classes: int = 4
) -> tuple[list[float], list[float]]:
    """Returns the losses of steps of two micro-batches, and of the whole mini-batch."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, num_classes)), torch.randn(4, 6)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), check=False)
    steps = [pipeline.step(x, target=target) for _ in range(num_steps)]
    return [step for step in steps if step is not None], [loss(module(x), target).item()] * num_steps


@pytest.mark.usefixtures("alone")
def test_what_a_function_keeps_beside_numbers_is_not_touched_ahead() -> None:
    noted: list[Tensor] = []
    calls = 0

    def noting(scores: Tensor, target: Tensor) -> Tensor:
        noted.append(scores.detach().mean())
        return functional.cross_entropy(scores, target)

    def counting(scores: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.cross_entropy(scores, target, ignore_index=IGNORED)

    two_micro_batches(noting, 2, torch.tensor([0, 1, 1, 2]))
    assert len(noted) == 5
    assert all(type(one) is Tensor for one in noted)
    got, want = two_micro_batches(counting, 2, torch.tensor([0, IGNORED, 1, 2]))
    assert calls == 5
    assert got == pytest.approx(want, rel=1e-6)


class Looking(nn.Module):
    """Reads its outputs in every second step of two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        if self.calls % 4 >= 2:
            assert torch.isfinite(scores).all()
        self.calls += 1
        return functional.cross_entropy(scores, target)


@pytest.mark.usefixtures("alone")
def test_in_steps_in_which_a_loss_cannot_run_ahead_all_micro_batches_count_alike() -> None:
    got, want = two_micro_batches(Looking(), 4, torch.tensor([0, 1, 1, 2]))
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.ones(256)), functional.cross_entropy]
)
def test_bytes_as_targets_ignore_nothing(loss: Loss) -> None:
    got, want = two_micro_batches(loss, 1, torch.tensor([156, 156, 1, 2], dtype=torch.uint8), 256)
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("num_means", [2, 17])
def test_where_micro_batches_compute_other_means_or_too_many_all_count_alike(num_means: int) -> None:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        value = functional.cross_entropy(scores, target, ignore_index=IGNORED)
        for _ in range(num_means - 1 if num_means > 2 or bool((target == IGNORED).any()) else 0):
            value = value + functional.cross_entropy(2 * scores, target, ignore_index=IGNORED)
        return value

    torch.manual_seed(0)
    module, x, target = nn.Sequential(nn.Linear(6, 4)), torch.randn(4, 6), torch.tensor([0, IGNORED, 1, 2])
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0))
    parts = [loss(module(part), rows).item() for part, rows in zip(x.chunk(2), target.chunk(2), strict=True)]
    assert pipeline.step(x, target=target) == pytest.approx(sum(parts) / 2, rel=1e-6)


def of_depths(scores: Tensor, target: Tensor) -> Tensor:
    """A mean over the points that have a depth, as no example of zeros tells."""
    known = target > 0
    return (scores[:, 0][known] - target[known]).abs().mean()


def drawn(scores: Tensor, target: Tensor) -> Tensor:
    return functional.dropout(scores).square().mean()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute", [(), (1,)])
@pytest.mark.parametrize("without", [2, 6])  # in the first micro-batch, or the second one
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (of_depths, "for the first samples, the loss of a batch is"),
        (functional.l1_loss, None),
        (drawn, "for the first samples, the loss could not be compared"),
    ],
)
def test_the_first_step_tells_of_losses_that_depend_on_the_cut(
    loss: Loss, words: str | None, without: int, recompute: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), torch.randn(8, 6)
    target = torch.arange(1.0, 9.0)
    target[without] = 0
    order = [["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"]]
    plan = make_plan(["0", "1"], (1,), (0, 0), order, 4, 2, recompute)
    target = target if loss is not functional.l1_loss else target[:, None]
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), check=False)
    losses = [pipeline.step(x, target=target) for _ in range(2)]
    assert losses[0] == losses[1] or loss is drawn
    told = [message for message in caplog.messages if "the loss" in message]
    assert len(told) == (words is not None)
    assert all(words in message for message in told)


@pytest.mark.usefixtures("alone")
def test_labels_out_of_range_are_refused_by_the_loss() -> None:
    loss = nn.CrossEntropyLoss(torch.ones(4))
    plan, x = make_plan(["0"], (), (0,), [["0F0", "0B0"]], 2, 1), torch.randn(2, 6)
    pipeline = Pipeline(nn.Sequential(nn.Linear(6, 4)), plan, loss=loss, inputs=[x])
    with pytest.raises(LayerFailed, match="its targets are 1 to 7"):
        pipeline.step(x, target=torch.tensor([1, 7]))


def test_replicas_agree_on_whether_a_loss_is_one_mean() -> None:
    """It is in some micro-batches and a sum in others, which are on other ranks."""

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        value = functional.cross_entropy(scores, target, ignore_index=IGNORED)
        return value + scores.square().mean() if (target == 2).any() else value

    target, gathered = torch.tensor([0, IGNORED, 1, 2]), list[Tensor]()
    replicas = [_weights(loss, [m], lambda part: gathered.append(part) or part) for m in (0, 1)]  # type: ignore[func-returns-value]
    for one in replicas:
        one.begin(target, 2)
    total = gathered[0] + gathered[1]
    replicas = [_weights(loss, [m], lambda part: total) for m in (0, 1)]
    scores, values = torch.randn(4, 4), list[float]()
    for m, one in enumerate(replicas):
        one.begin(target, 2)
        rows = slice(2 * m, 2 * m + 2)
        values.append(one.computed(of_first(loss), [scores[rows]], target[rows]).item())
    mean = functional.cross_entropy(scores, target, ignore_index=IGNORED).item()
    assert sum(values) / 2 == pytest.approx(mean + scores[2:].square().mean().item() / 2)


@pytest.mark.usefixtures("alone")
def test_comparing_the_first_samples_leaves_graphs_alone() -> None:
    """Of a loss that divides by a mean which it keeps, and changes in place."""
    kept = torch.ones(())

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        value = functional.mse_loss(scores, target)
        kept.mul_(0.9).add_(0.1 * value.detach())
        return value / kept

    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(4, 6)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.0), check=False)
    target = torch.randn(4, 4)
    got = [pipeline.step(x, target=target) for _ in range(3)]
    kept.fill_(1)
    want = [sum(loss(module(a), b).item() for a, b in zip(x.chunk(2), target.chunk(2), strict=True)) / 2 for _ in got]
    assert got == pytest.approx(want, rel=1e-6)


def _with(sums: dict[int, float]) -> Callable[[Tensor], Tensor]:
    """Adds up what one replica has to sums that begin with these."""
    return lambda part: torch.tensor([sums.get(i, 0.0) for i in range(len(part))], dtype=part.dtype)


def test_replicas_count_together() -> None:
    target, loss = torch.tensor([0, IGNORED, 1, 2]), nn.CrossEntropyLoss(ignore_index=IGNORED)
    first, second = (_weights(loss, [m], _with({0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0, 4: 3.0})) for m in (0, 1))
    for weights in (first, second):
        weights.begin(target, 2)
    # Zeros have a mean of log 4, which counts by the targets of a micro-batch: one of three, or two.
    for weights, labels, factor in ((first, target[:2], 2 / 3), (second, target[2:], 4 / 3)):
        value = weights.computed(of_first(loss), [torch.zeros(2, 4)], labels)
        assert value.item() == pytest.approx(factor * log(4))


@pytest.mark.usefixtures("alone")
def test_a_loss_that_is_no_tensor_is_refused() -> None:
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0"]], 2, 1)
    x = torch.randn(2, 4)

    def loss(output: Tensor, target: Tensor) -> Any:
        return 0

    pipeline = Pipeline(nn.Sequential(nn.Linear(4, 4)), plan, loss=loss, inputs=[x], check=False)
    with pytest.raises(BapipeError, match=r"the loss must be a scalar tensor, .*; it gives 0 \(int\)"):
        pipeline.step(x, target=torch.tensor([0, 1]))


def test_losses_that_ignore_nothing_keep_their_value() -> None:
    weights = _weights(functional.mse_loss, [0], lambda part: part)
    weights.begin(torch.zeros(2, 4), 1)
    value = torch.tensor(0.7)
    assert weights.computed(lambda output, target: value, [torch.zeros(2, 4)], torch.zeros(2, 4)) is value


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_after_the_first_step_no_micro_batch_waits_for_the_gpu(
    label_smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, target = nn.CrossEntropyLoss(torch.ones(4), label_smoothing=label_smoothing), torch.tensor([0, 1, 2, 2])
    weights = _weights(loss, [0, 1], lambda part: part)
    waits: list[str] = []

    def waiting(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*given: Any) -> Any:
            waits.append(name)
            return real(*given)

        monkeypatch.setattr(owner, name, noted)

    weights.begin(target, 2)
    waiting(torch, "equal")
    waiting(Tensor, "__bool__")
    waiting(Tensor, "item")
    weights.begin(target, 2)
    zeros = [torch.zeros(2, 4)]
    assert weights.computed(of_first(loss), zeros, target[:2]).item() == pytest.approx(log(4))
    weights.computed(of_first(loss), [torch.ones(2, 4)], target[2:])
    waits.clear()  # the first two are compared
    assert weights.computed(of_first(loss), zeros, target[:2]).item() == pytest.approx(log(4))
    assert waits == ["item"]  # of this test


def test_class_weights_that_become_zero_between_steps_are_seen() -> None:
    """Smoothed labels of classes without weight count, so the loss is no mean over targets any more."""
    weight = torch.ones(4)
    loss, target = nn.CrossEntropyLoss(weight, label_smoothing=0.1), torch.tensor([0, 1])
    assert weighted_loss(loss, torch.zeros(2, 4), target, None).weight == 2
    weight[3] = 0
    assert weighted_loss(loss, torch.zeros(2, 4), target, None).weight is None
    weight[3] = 2
    assert weighted_loss(loss, torch.zeros(2, 4), target, None).weight == 2


def test_a_loss_keeps_its_buffers() -> None:
    class Counted(nn.CrossEntropyLoss):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, scores: Tensor, target: Tensor) -> Tensor:
            self.calls.add_(1)
            return super().forward(scores, target)

    loss = Counted()
    weights = _weights(loss, [0, 1], lambda part: part)
    weights.begin(torch.tensor([0, 1, 2, 2]), 2)
    assert loss.calls == 0


def test_a_step_of_one_micro_batch_is_not_warned_of_how_it_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    def between_samples(scores: Tensor, target: Tensor) -> Tensor:
        return (scores @ scores.T).logsumexp(1).mean()

    steps = torch.randn(3, 4, 4)  # before the loss's generators are set
    for num, warned in ((1, False), (2, True)):
        weights = _weights(between_samples, [0], lambda part: part)
        for scores in steps:
            weights.begin(torch.zeros(4 * num, 4), num)
            weights.computed(of_first(between_samples), [scores], torch.zeros(4, 4))
        assert ("training depends on which samples share a micro-batch" in caplog.text) is warned


def of_first(loss: Loss) -> Loss:
    """The same of the tensors that a stage returns."""
    return lambda outputs, target: loss(outputs[0], target)


def _weights(loss: Loss, microbatches: list[int], total: Callable[[Tensor], Tensor]) -> LossWeights:
    outputs = [torch.empty(2, 4, device="meta")]
    ahead = WeightsAhead(loss, of_first(loss), outputs, [BY_ROWS], CPU)
    return LossWeights(ahead, microbatches, total, PerOperatorRng(0, CPU))
