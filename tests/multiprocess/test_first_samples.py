"""Losses that depend on how a mini-batch is cut are told of in the second step, wherever outputs have their samples."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, mse_loss

import bapipe
from bapipe.equivalence.outcome import Loss
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from tests.multiprocess.runtime_cases import make_plan

NUM, LENGTH, VOCABULARY = 8, 5, 12
PADDING = 1  # neither the least label nor -100

Order = tuple[int, ...]


class Words(nn.Module):
    """Scores of each word [samples, words, labels], in another order of dimensions, or with these made one."""

    def __init__(self, order: Order = (0, 1, 2), *, flat: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.order, self.flat = order, flat

    def forward(self, words: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.words(words))).permute(self.order)
        return scores.flatten(0, 1) if self.flat else scores


class Tied(nn.Module):
    """Returns the weight that the loss makes scores with."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(self.words(words)), self.words.weight


class Experts(nn.Module):
    """Returns a value of the whole batch, the balance of four experts, or that of each: as many as samples."""

    def __init__(self, *, of_each: bool = False) -> None:
        super().__init__()
        self.words, self.gate, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 2), nn.Linear(6, VOCABULARY)
        self.of_each = of_each

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.words(words))
        load = self.gate(hidden).softmax(-1).mean((0, 1))
        return self.head(hidden), load if self.of_each else load.square().sum()


class Penalized(Words):
    """Returns the scores, and the mean over all words of what they are to be small for, as the divergence of a VAE."""

    def forward(self, words: Tensor) -> Any:
        scores = super().forward(words)
        return scores, scores.square().sum((1, 2)).sum() / len(words)


class Selects(nn.Module):
    """Returns the words that are no padding, in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(words)))[words != PADDING]


class ComputesItsLoss(Words):
    """Returns a loss of words that are to be the same again."""

    def forward(self, words: Tensor) -> Any:
        scores = super().forward(words)
        return cross_entropy(scores.flatten(0, 1), words.flatten(), ignore_index=PADDING), scores


def by_words(output: Any, order: Order = (0, 1, 2)) -> Tensor:
    """Scores as [samples, words, labels], of what has another order, or of a hidden state and the weights."""
    if isinstance(output, tuple):
        return output[0] @ output[1].T
    scores: Tensor = output.permute([order.index(dim) for dim in range(3)])
    return scores


def masked(output: Any, target: Tensor, order: Order = (0, 1, 2)) -> Tensor:
    """The mean of one's own over words that are no padding: another one in each micro-batch."""
    each = cross_entropy(by_words(output, order).transpose(1, 2), target, reduction="none")
    return (each * (target != PADDING)).sum() / (target != PADDING).sum()


def counted(output: Any, target: Tensor, order: Order = (0, 1, 2)) -> Tensor:
    """The same, such that micro-batches can be weighted, in a sum."""
    scores = by_words(output, order)
    each = cross_entropy(scores.transpose(1, 2), target, reduction="none")
    return bapipe.weighted_mean(each, target != PADDING) + 0.1 * scores.square().mean()


def flat_mean(output: Tensor, target: Tensor, interleaved: bool) -> Tensor:
    return cross_entropy(output, (target.T if interleaved else target).flatten(), reduction="none").mean()


def flat_masked(output: Tensor, target: Tensor, interleaved: bool) -> Tensor:
    labels = (target.T if interleaved else target).flatten()
    each = cross_entropy(output, labels, reduction="none")
    return (each * (labels != PADDING)).sum() / (labels != PADDING).sum()


def ctc(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    lengths = (target != PADDING).sum(1).clamp(max=2)
    num_words = torch.full((len(target),), len(output))
    value = ctc_loss(output.log_softmax(-1), target, num_words, lengths, reduction=reduction)
    return value if reduction == "mean" else value / lengths.sum()


def with_balance(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return cross_entropy(output[0].transpose(1, 2), target) + output[1].square().sum()


def with_penalty(output: tuple[Tensor, Tensor], target: Tensor, power: int = 1) -> Tensor:
    return cross_entropy(output[0].transpose(1, 2), target) + 0.1 * output[1] ** power


def without_balance(output: tuple[Tensor, Tensor], target: Tensor, padding: int | None = None) -> Tensor:
    each = cross_entropy(output[0].transpose(1, 2), target, reduction="none")
    return each.mean() if padding is None else each[target != padding].mean()


def of_selected(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


LENGTH_FIRST, LABELS_FIRST = (1, 0, 2), (2, 1, 0)
DEPENDS, UNCOMPARED = "the mean of its halves", "the loss could not be compared"
OF_WHOLE = "that the model computes of a whole micro-batch"


def sentences(length: int = LENGTH, alike: int = 0) -> tuple[Tensor, Tensor]:
    """Words, and labels that end in padding: of unlike lengths, but for some sentences at the start."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(2, VOCABULARY, (NUM, length), generator=generator)
    labels = torch.randint(2, VOCABULARY, (NUM, length), generator=generator)
    labels[5, 0] = labels[2, 1] = 0
    for sample, num_padding in enumerate((0, 3, 1, 0, 2, 4, 0, 1)):
        labels[sample, length - (1 if sample < alike else num_padding % length) :] = PADDING
    return words, torch.where(torch.arange(length) == 0, labels.clamp(min=2), labels)


def trained(
    make: Callable[[], nn.Module], loss: Loss, words: Tensor, target: Tensor, num_microbatches: int, num_stages: int = 2
) -> bool:
    """Returns whether two steps leave the gradients of one process of plain torch on the whole mini-batch."""
    torch.manual_seed(0)
    whole = make().double()
    part, size = copy.deepcopy(whole), NUM // num_microbatches
    layers = [layer.name for layer in trace(part, (words,), microbatch_size=size).layers]
    stages = range(num_stages)
    forwards = [f"{s}F{m}" for m in range(num_microbatches) for s in stages]
    backwards = [f"{s}B{m}" for m in range(num_microbatches) for s in reversed(stages)]
    cuts, ranks = ((1,), (0, 0)) if num_stages == 2 else ((), (0,))
    plan = make_plan(layers, cuts, ranks, [[*forwards, *backwards]], size, num_microbatches)
    pipeline = Pipeline(part, plan, loss=loss, inputs=[words], optimizer=sgd(0.0), check=False)
    state = torch.random.get_rng_state()
    for _ in range(2):
        pipeline.step(words, target=target)
    assert torch.equal(torch.random.get_rng_state(), state)
    loss(whole(words), target).backward()
    want = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    got = {name: parameter.grad for name, parameter in pipeline.named_parameters().items()}
    return all(
        gradient is not None and torch.allclose(gradient, want[name], atol=1e-12, rtol=1e-9)
        for name, gradient in got.items()
        if name in want
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    ("make", "loss", "words"),
    [
        (Words, masked, DEPENDS),
        (Words, counted, None),
        (partial(Words, LENGTH_FIRST), partial(masked, order=LENGTH_FIRST), DEPENDS),
        (partial(Words, LENGTH_FIRST), partial(counted, order=LENGTH_FIRST), None),
        (partial(Words, LABELS_FIRST), partial(masked, order=LABELS_FIRST), DEPENDS),
        (partial(Words, LABELS_FIRST), partial(counted, order=LABELS_FIRST), None),
        (partial(Words, flat=True), partial(flat_mean, interleaved=False), None),
        (partial(Words, flat=True), partial(flat_masked, interleaved=False), DEPENDS),
        (partial(Words, LENGTH_FIRST, flat=True), partial(flat_mean, interleaved=True), None),
        (partial(Words, LENGTH_FIRST, flat=True), partial(flat_masked, interleaved=True), DEPENDS),
        (partial(Words, LENGTH_FIRST), ctc, None),
        (partial(Words, LENGTH_FIRST), partial(ctc, reduction="sum"), DEPENDS),
        (Tied, masked, DEPENDS),
        (Tied, counted, None),
        (Experts, with_balance, OF_WHOLE),
        (partial(Experts, of_each=True), with_balance, OF_WHOLE),
        (Penalized, with_penalty, None),
        (Penalized, partial(with_penalty, power=2), DEPENDS),
        (Experts, without_balance, None),
        (Experts, partial(without_balance, padding=PADDING), DEPENDS),
        (ComputesItsLoss, lambda output, _: output[0], OF_WHOLE),
    ],
)
def test_losses_train_as_on_the_whole_mini_batch_or_it_is_told(
    make: Callable[[], nn.Module], loss: Loss, words: str | None, num_stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    labels, target = sentences()
    labels = target if make is ComputesItsLoss else labels
    is_exact = trained(make, loss, labels, target, 4, num_stages)
    assert is_exact == (words is None)
    told = [message for message in caplog.messages if "the loss" in message]
    assert len(told) == (words is not None)
    assert all(words in message for message in told if words is not None)


@pytest.mark.usefixtures("alone")
def test_as_many_words_as_samples_are_not_taken_for_samples(caplog: pytest.LogCaptureFixture) -> None:
    words, target = sentences(length=2)
    assert not trained(partial(Words, LENGTH_FIRST), partial(masked, order=LENGTH_FIRST), words, target, 4)
    assert any(DEPENDS in message for message in caplog.messages)


@pytest.mark.usefixtures("alone")
def test_padding_is_noticed_where_the_first_sentences_have_as_much(caplog: pytest.LogCaptureFixture) -> None:
    words, target = sentences(alike=4)
    assert not trained(Words, masked, words, target, 4)
    assert any(DEPENDS in message for message in caplog.messages)


@pytest.mark.usefixtures("alone")
def test_outputs_without_a_dimension_of_the_samples_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    words, target = sentences()
    assert not trained(Selects, of_selected, target.where(target == PADDING, words), target, 4, num_stages=1)
    (told,) = [message for message in caplog.messages if "the loss" in message]
    assert UNCOMPARED in told
    assert "has no dimension of the samples" in told
    assert "bapipe.weighted_mean" in told


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("sizes", "loss", "words"),
    [
        ((1, 2), flat_mean, None),  # halves of the first micro-batch are compared, and no more
        ((1, 2), flat_masked, DEPENDS),
        ((2, 4), flat_masked, DEPENDS),
        ((2,), flat_masked, "it fails on other numbers of samples"),
    ],
)
def test_losses_are_compared_on_as_many_samples_as_they_take(
    sizes: tuple[int, ...], loss: Callable[..., Tensor], words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    def checked(output: Tensor, target: Tensor) -> Tensor:
        assert len(target) in (*sizes, NUM)  # the whole mini-batch, of plain torch
        return loss(output, target, interleaved=False)

    assert trained(partial(Words, flat=True), checked, *sentences(), 4) == (words is None)
    told = [message for message in caplog.messages if "the loss" in message]
    assert len(told) == (words is not None)
    assert all(words in message for message in told if words is not None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("make", "loss"), [(Words, masked), (Experts, with_balance), (Selects, of_selected)])
def test_nothing_is_told_of_a_mini_batch_that_is_not_cut(
    make: Callable[[], nn.Module], loss: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    words, target = sentences()
    assert trained(make, loss, target.where(target == PADDING, words), target, 1, num_stages=1)
    assert not [message for message in caplog.messages if "the loss" in message]


@pytest.mark.usefixtures("alone")
def test_buffers_are_those_of_one_forward_for_each_micro_batch() -> None:
    """A batch norm counts its forwards."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    whole, x, target = copy.deepcopy(module), torch.randn(8, 6).double(), torch.randn(8, 4).double()
    layers = [layer.name for layer in trace(module, (x,), microbatch_size=4).layers]
    plan = make_plan(layers, (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 4, 2)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=[x], optimizer=sgd(0.0), check=False)
    for _ in range(3):
        pipeline.step(x, target=target)
        for part in x.chunk(2):
            whole(part)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(pipeline.state_dict()[name], value)
