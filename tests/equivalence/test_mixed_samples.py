"""Models in which samples of a batch meet are noticed, others are not."""

import pytest
import torch
from torch import Tensor, nn

from bapipe.equivalence.mixed_samples import outputs_over_parts
from bapipe.equivalence.outcome import Microbatch
from tests.models.small_zoo import QUICK, with_four_samples


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool = True, keeps_state: bool = False) -> None:
        super().__init__()
        self.lstm, self.keeps_state = nn.LSTM(6, 4, batch_first=batch_first), keeps_state
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is not None and self.state[0].shape[1] != len(x):
            self.state = None
        y, state = self.lstm(x, self.state)
        if self.keeps_state:
            self.state = state[0].detach(), state[1].detach()
        assert isinstance(y, Tensor)
        return y


class PaddedToTheLongest(nn.Module):
    """The mean over as many words as the longest sentence of the batch has."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int((x != 0).any(2).sum(1).max())].mean(1)


class Weighs(nn.Module):
    """Returns parameters, as many as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, self.weights


class LengthFirst(nn.Module):
    """Returns (words, samples, channels), perhaps without the mean over samples, and a value of the whole batch."""

    def __init__(self, *, meet: bool) -> None:
        super().__init__()
        self.meet = meet

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.transpose(0, 1)
        return y - y.mean(1, keepdim=True) if self.meet else y * 2, x.square().mean()


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class SetByFirst(nn.Module):
    """Scales by what the first samples are, as an activation norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.is_set = nn.Parameter(torch.ones(6)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.scale.data = 1 / x.detach().flatten(0, -2).std(0)
            self.is_set = True
        return x * self.scale


class Codebook(nn.Module):
    """Its entries are samples of the first batch, drawn by chance, as the means that k-means begins with."""

    entries: Tensor
    is_set: Tensor

    def __init__(self, *, only_trained: bool) -> None:
        super().__init__()
        self.only_trained = only_trained
        self.register_buffer("entries", torch.zeros(3, 6))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.detach().flatten(0, -2)
        if not self.is_set and (self.training or not self.only_trained):
            self.entries.copy_(rows[torch.randint(len(rows), (3,))])
            self.is_set.fill_(True)
        return x + self.entries[torch.cdist(rows, self.entries).argmin(1)].view_as(x)


class KeepsLargest(nn.Module):
    """What the first samples set, later ones may change: it is the same for micro-batches, one after another."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return x * 2


class MakesTable(nn.Module):
    """A table that the first forward makes does not depend on the samples."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.table = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return x + self.table


def fault(module: nn.Module, x: Tensor) -> str | None:
    return outputs_over_parts(module, Microbatch(inputs=(x,), target=torch.zeros(len(x))))


def sentences() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6)
    for sample, length in enumerate((2, 3, 5, 4)):
        x[sample, length:] = 0
    return x


@pytest.mark.parametrize(
    "module",
    [Recurrent(batch_first=False), Recurrent(keeps_state=True), PaddedToTheLongest(), LengthFirst(meet=True)],
    ids=str,
)
def test_samples_that_meet_are_noticed(module: nn.Module) -> None:
    assert (fault(module, sentences()) or "").startswith("the model's output for a sample depends on the samples that")


@pytest.mark.parametrize(
    "module",
    [
        Recurrent(),
        nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)),
        Weighs(),
        LengthFirst(meet=False),
        Draws(),  # of which nothing can be said
        KeepsLargest(),
        MakesTable(),
        nn.Flatten(0, 1),
    ],
    ids=str,
)
def test_others_are_not(module: nn.Module) -> None:
    assert fault(module, sentences()) is None
    assert module.training


@pytest.mark.parametrize("only_trained", [False, True])
def test_a_codebook_of_the_first_samples_is_told_until_it_is_set(only_trained: bool) -> None:
    module = Codebook(only_trained=only_trained)
    assert (fault(module, sentences()) or "").startswith("the model's first forward does more than later ones")
    assert not module.is_set
    module(sentences())
    assert fault(module, sentences()) is None


def test_values_that_the_first_samples_set_are_told_until_they_are_set() -> None:
    module = SetByFirst()
    assert (fault(module, sentences()) or "").startswith("the model's first forward does more than later ones")
    assert not module.is_set
    module(sentences())
    assert fault(module, sentences()) is None


@pytest.mark.parametrize("name", QUICK)
def test_no_model_of_the_zoo_is_noticed(name: str) -> None:
    example, batch = with_four_samples(name)
    assert outputs_over_parts(example.module, batch) is None
