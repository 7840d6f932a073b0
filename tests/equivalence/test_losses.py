"""Losses that depend on how a batch is cut into micro-batches are noticed, others are not."""

from collections.abc import Callable
from functools import partial
from io import StringIO

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from bapipe.equivalence.losses import loss_over_parts
from bapipe.equivalence.outcome import Microbatch
from bapipe.errors import InvalidModel
from bapipe.losses import weighted_mean
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.report.profiles import render_profile
from tests.models.small_zoo import QUICK, with_four_samples

CLASSES = torch.tensor([1.0, 5, 2, 1])
WORDS = torch.tensor([[1, 2, 0], [3, 1, 2], [2, 2, 1], [1, 0, 0]])


def of_words(scores: Tensor, target: Tensor, **options: int) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), target.flatten(), **options)  # type: ignore[arg-type]


def mean_of_words(scores: Tensor, target: Tensor) -> Tensor:
    each = cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none")
    return (each * (target != 0).flatten()).sum() / (target != 0).sum()


class Focal(nn.CrossEntropyLoss):
    """A mean over samples, also with class weights (Lin et al. 2017, arXiv:1708.02002)."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        each = cross_entropy(scores, target, self.weight, ignore_index=self.ignore_index, reduction="none")
        return ((1 - (-each).exp()).square() * each).mean()


def fault(loss: Callable[[Tensor, Tensor], Tensor], target: Tensor, *shape: int) -> str | None:
    torch.manual_seed(0)
    return loss_over_parts(nn.Linear(6, 4), loss, Microbatch(inputs=(torch.randn(4, *shape, 6),), target=target))


@pytest.mark.parametrize(
    ("loss", "target", "shape"),
    [
        (cross_entropy, torch.tensor([0, 1, 2, 3]), ()),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([0, 1, 2, 3]), ()),
        (nn.CrossEntropyLoss(ignore_index=3), torch.tensor([0, 1, 3, 1]), ()),
        (nn.CrossEntropyLoss(ignore_index=3), torch.tensor([3, 3, 1, 1]), ()),  # a half without targets
        (nn.CrossEntropyLoss(CLASSES, ignore_index=3, label_smoothing=0.1), torch.tensor([0, 1, 2, 3]), ()),
        (partial(cross_entropy, weight=CLASSES), torch.tensor([0, 1, 2, 3]), ()),
        (partial(cross_entropy, weight=CLASSES, reduction="mean"), torch.tensor([0, 1, 2, 3]), ()),
        (Focal(CLASSES), torch.tensor([0, 1, 2, 3]), ()),
        (of_words, WORDS, (3,)),
        (lambda y, target: weighted_mean(y.square(), (target != 0)[:, :, None]), WORDS, (3,)),
        (partial(of_words, ignore_index=0), WORDS, (3,)),
        (of_words, WORDS.masked_fill(WORDS == 0, -100), (3,)),
        (lambda y, target: cross_entropy(y, target, ignore_index=0), torch.full((4,), 2), ()),
        (lambda y, target: cross_entropy(y, target, CLASSES), torch.tensor([0, 1, 2, 3]), ()),
        (mse_loss, torch.randn(4, 4), ()),
    ],
)
def test_means_over_the_batch_are_fine(
    loss: Callable[[Tensor, Tensor], Tensor], target: Tensor, shape: tuple[int, ...]
) -> None:
    assert fault(loss, target, *shape) is None


@pytest.mark.parametrize(
    ("loss", "target", "shape", "words"),
    [
        (partial(cross_entropy, reduction="sum"), torch.tensor([0, 1, 2, 3]), (), "the loss is a sum over the batch"),
        (nn.CrossEntropyLoss(CLASSES - 1, label_smoothing=0.1), torch.tensor([0, 1, 1, 1]), (), "share a micro-batch"),
        (mean_of_words, WORDS, (3,), "share a micro-batch"),
        (
            lambda y, target: cross_entropy(y, target, CLASSES) ** 2,
            torch.tensor([0, 1, 2, 3]),
            (),
            "share a micro-batch",
        ),
        (lambda y, target: cross_entropy(y, y.argmax(1), CLASSES), torch.zeros(4), (), "share a micro-batch"),
        (lambda y, target: (y.flatten() - target.flatten()).std(), torch.randn(4, 4), (), "share a micro-batch"),
    ],
)
def test_other_losses_are_noticed(
    loss: Callable[[Tensor, Tensor], Tensor], target: Tensor, shape: tuple[int, ...], words: str
) -> None:
    assert words in (fault(loss, target, *shape) or "")


FILE = StringIO()


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (lambda value: value.item(), "its code reads values of outputs, as `.item()` does ("),
        (lambda _: FILE.write("loss"), "its code reaches an object of type StringIO)"),
    ],
)
def test_what_prevents_weights_by_targets_is_named(note: Callable[[Tensor], object], words: str) -> None:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        value = cross_entropy(scores, target)
        note(value)
        return value

    found = fault(loss, torch.tensor([0, 1, 2, 3])) or ""
    assert found.startswith("if some targets are -100, the loss of a batch is ")
    assert "is a sum" not in found
    assert words in found
    assert "weighted_mean" not in found


@pytest.mark.parametrize("padding", [0, 7, -100])
def test_a_mean_by_a_mask_is_noticed_where_all_outputs_are_equal(padding: int) -> None:
    """As those of inputs of zeros are; and where the example has no padding."""

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        each = cross_entropy(scores, target, reduction="none", ignore_index=padding)
        return each.sum() / (target != padding).sum()

    batch = Microbatch(inputs=(torch.zeros(4, 6),), target=torch.tensor([1, 2, 3, 1]))
    found = loss_over_parts(nn.Linear(6, 4), loss, batch)
    assert found is not None
    assert found.startswith(f"if some targets are {padding}, the loss of a batch is")


class ComputesItsLoss(nn.Module):
    """As language models do that are given their labels."""

    def __init__(self, ignored: int, reduction: str) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, 5)
        self.ignored, self.reduction = ignored, reduction
        self.drop = nn.Dropout(0.5)

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.drop(self.words(words)))
        each = cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=self.ignored)
        total = each.sum() if self.reduction == "sum" else each.mean()
        return scores, total * len(each) / (labels != self.ignored).sum() if self.reduction == "mean" else total


@pytest.mark.parametrize(
    ("ignored", "reduction", "words"),
    [
        (-100, "mean", "if some labels among the inputs are -100, the loss of a batch is"),
        (-1, "mean", "if some labels among the inputs are -1, the loss of a batch is"),
        (0, "mean", "the loss of a batch is"),
        (255, "mean", "if some labels among the inputs are 255, the loss of a batch is"),
        (-100, "sum", "the loss is a sum over the batch"),
        (-100, "by word", None),
    ],
)
def test_a_loss_that_the_model_computes_is_noticed_too(ignored: int, reduction: str, words: str | None) -> None:
    torch.manual_seed(0)
    inputs = (torch.randint(9, (4, 3)), torch.tensor([[1, 2, 3], [3, 1, 2], [2, 2, 1], [1, 0, 4]]))
    batch = Microbatch(inputs=inputs, target=torch.zeros(4))
    module = ComputesItsLoss(ignored, reduction)
    found = loss_over_parts(module, lambda output, _: output[1], batch)
    assert found is words if words is None else found is not None and found.startswith(words)
    assert module.training


def test_a_mean_by_a_mask_is_noticed_where_outputs_are_by_words() -> None:
    """Of a model that returns the words of all samples in one row."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Flatten(0, 1))
    target = torch.randint(1, 4, (4, 3))
    batch = Microbatch(inputs=(torch.randn(4, 3, 6),), target=target)

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        each = cross_entropy(scores, target.flatten(), reduction="none", ignore_index=0)
        return each.sum() / (target != 0).sum()

    assert "the loss of a batch is" in (loss_over_parts(module, loss, batch) or "")


class LengthFirst(nn.Module):
    """Returns (words, samples, labels), perhaps with a value of the whole batch beside."""

    def __init__(self, *, with_value: bool = False) -> None:
        super().__init__()
        self.linear, self.with_value = nn.Linear(6, 4), with_value

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y: Tensor = self.linear(x).transpose(0, 1)
        return (y, y.square().mean()) if self.with_value else y


@pytest.mark.parametrize("with_value", [False, True])
@pytest.mark.parametrize("padding", [None, 0, 1])
@pytest.mark.parametrize("num_words", [3, 4])  # or as many as samples
def test_a_mean_by_a_mask_is_noticed_where_words_come_before_samples(
    num_words: int, padding: int | None, with_value: bool
) -> None:
    """And where the example has no padding, which the code of the loss names."""

    def loss(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        scores = output[0] if isinstance(output, tuple) else output
        each = cross_entropy(scores.permute(1, 2, 0), target, reduction="none")
        mask = torch.ones_like(target) if padding is None else (target != padding)
        return (each * mask).sum() / mask.sum()

    torch.manual_seed(0)
    target = torch.randint(2, 4, (4, num_words))
    batch = Microbatch(inputs=(torch.randn(4, num_words, 6),), target=target)
    found = loss_over_parts(LengthFirst(with_value=with_value), loss, batch)
    assert (found is None) == (padding is None)
    assert padding is None or (found or "").startswith(f"if some targets are {padding}, the loss of a batch is")


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.scale.exp()


def test_losses_over_pairs_of_samples_are_noticed_beside_a_scalar_output() -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return cross_entropy(output[1] * output[0] @ output[0].T, torch.arange(len(target)))

    batch = Microbatch(inputs=(torch.randn(4, 6),), target=torch.zeros(4))
    assert "samples share a micro-batch" in (loss_over_parts(Contrast(), loss, batch) or "")


def test_a_loss_that_reads_parameters_of_the_model_is_noticed() -> None:
    module = nn.Linear(6, 4)
    batch = Microbatch(inputs=(torch.randn(4, 6),), target=torch.tensor([0, 1, 2, 3]))
    found = loss_over_parts(module, lambda y, target: cross_entropy(y, target) + module.weight.pow(2).sum(), batch)
    assert found is not None
    assert found.startswith("the loss reads parameter 'weight' of the model")


def test_a_profile_says_so_and_that_the_stages_are_equal() -> None:
    made = measure_model(
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)),
        (torch.randn(4, 6),),
        torch.tensor([0, 1, 2, 3]),
        partial(cross_entropy, reduction="sum"),
        ProfileOptions(microbatch_sizes=(2,), seconds_per_size=0.0),
        name="summed",
    )
    lines = [line for line in render_profile(made) if isinstance(line, str)]
    assert lines[1] == "in 2 stages, the model equals the original: loss, 4 gradients, 0 changed buffers"
    assert lines[2].startswith("the loss is a sum over the batch")


@pytest.mark.parametrize("name", QUICK)
def test_no_loss_of_the_zoo_is_noticed(name: str) -> None:
    example, batch = with_four_samples(name)
    assert loss_over_parts(example.module, example.loss, batch) is None


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


def test_a_loss_may_read_a_parameter_that_the_model_returns() -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return (output[0] - target[:, None]).square().mean() + output[1].square().sum()

    batch = Microbatch(inputs=(torch.randn(4, 6),), target=torch.tensor([0, 1, 2, 3]))
    assert loss_over_parts(ReturnsItsWeight(), loss, batch) is None


class Temperature(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output * self.scale, target)


def test_a_loss_with_parameters_to_train_is_refused() -> None:
    def measured(trained: bool) -> object:
        target = torch.zeros(1, dtype=torch.int64)
        module, loss = nn.Linear(6, 4), Temperature(trained)
        return measure_model(
            module,
            (torch.randn(1, 6),),
            target,
            loss,
            ProfileOptions(microbatch_sizes=(1,), seconds_per_size=0.0),
            name="it",
        )

    with pytest.raises(
        InvalidModel, match=r"^the loss has parameters to train, such as 'scale', but only those of the"
    ):
        measured(True)
    measured(False)
