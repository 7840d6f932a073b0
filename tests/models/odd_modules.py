"""Tiny models that each do one odd thing in their forward, between layers of a plain network, or around them.

A `Body` maps (n, 8) to (n, 8). `nested` puts it as a module inside a network; `rooted` makes its code the network's own
forward, in which no module around it can become one layer.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


class Body(nn.Module):
    """Two layers; `odd` is what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.odd(self.first(x)))
        return y

    def odd(self, y: Tensor) -> Tensor:
        return y.tanh()


# Functions with a backward of their own


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class GradientReversal(Body):
    def odd(self, y: Tensor) -> Tensor:
        reversed_: Tensor = _Reverse.apply(y, 0.5)
        return reversed_


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class StraightThrough(Body):
    def odd(self, y: Tensor) -> Tensor:
        rounded: Tensor = _Round.apply(y)
        return rounded


class _Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        inside = ((x / step) >= low) & ((x / step) <= high)
        ctx.save_for_backward(inside)
        ctx.mark_non_differentiable(inside)
        return (x / step).round().clamp(low, high) * step, inside

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return grad * inside, (grad * ~inside).sum().reshape(1), None, None


class FakeQuantised(Body):
    """A function with a learned step, two results and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full((1,), 0.1, dtype=torch.float64))

    def odd(self, y: Tensor) -> Tensor:
        quantised, inside = _Quantise.apply(y, self.step, -3, 3)
        return quantised + 0.1 * inside


class DetachTrick(Body):
    def odd(self, y: Tensor) -> Tensor:
        return y + (y.round() - y).detach()


# Checkpointing of the model's own


class Reentrant(Body):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._run, x, use_reentrant=True)
        return y

    def _run(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


class NotReentrant(Reentrant):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return y


# Hooks


class TensorHook(Body):
    def odd(self, y: Tensor) -> Tensor:
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return y.tanh()


class PlainTensorHook(Body):
    def odd(self, y: Tensor) -> Tensor:
        z = y.tanh()
        z.register_hook(lambda grad: grad * 0.5)
        return z + y


def _halved(grads: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


class Hooked(Body):
    """A container with the hook of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.Tanh())
        self.hook()

    def hook(self) -> None:
        raise NotImplementedError

    def odd(self, y: Tensor) -> Tensor:
        z: Tensor = self.inner(y)
        return z


class ContainerForwardHook(Hooked):
    def hook(self) -> None:
        self.inner.register_forward_hook(lambda module, args, result: result * 2 + args[0])


class ContainerForwardPreHook(Hooked):
    def hook(self) -> None:
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


class ContainerBackwardHook(Hooked):
    def hook(self) -> None:
        self.inner.register_full_backward_hook(lambda module, grads, _: _halved(grads))


class ContainerBackwardPreHook(Hooked):
    def hook(self) -> None:
        self.inner.register_full_backward_pre_hook(lambda module, grads: _halved(grads))


class LeafForwardHook(Hooked):
    def hook(self) -> None:
        self.first.register_forward_hook(lambda module, args, result: result * 2)


class LeafBackwardHook(Hooked):
    def hook(self) -> None:
        self.second.register_full_backward_hook(lambda module, grads, _: _halved(grads))


class OwnBackwardHook(Hooked):
    """Hooks on the body itself."""

    def hook(self) -> None:
        self.register_full_backward_hook(lambda module, grads, _: _halved(grads))


class OwnForwardHook(Hooked):
    def hook(self) -> None:
        self.register_forward_hook(lambda module, args, result: result * 2)


class RecordingHook(Hooked):
    """A forward hook that keeps what a container gives, for a term of its own in the forward."""

    def hook(self) -> None:
        self.kept: list[Tensor] = []
        self.inner.register_forward_hook(lambda module, args, result: self.kept.append(result))

    def odd(self, y: Tensor) -> Tensor:
        self.kept.clear()
        return super().odd(y) + self.kept[0] ** 2


class ParameterHook(Hooked):
    def hook(self) -> None:
        self.first.weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))


class AfterAccumulationHook(Hooked):
    def hook(self) -> None:
        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        self.first.weight.register_post_accumulate_grad_hook(halve)


# Memory that is written to


class OutArgument(Body):
    def odd(self, y: Tensor) -> Tensor:
        scale = torch.empty_like(y)
        with torch.no_grad():
            torch.abs(y, out=scale)
        return y / (1 + scale)


class ClampedWeight(Body):
    def odd(self, y: Tensor) -> Tensor:
        self.first.weight.data.clamp_(-0.2, 0.2)
        self.second.weight.data.clamp_(-0.1, 0.1)
        return y.tanh()


class NormalisedWeight(Body):
    def odd(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.copy_(functional.normalize(self.second.weight, dim=1))
        return y.tanh()


class ClampedWithoutLayer(Body):
    """Clamps a parameter that it uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 3.0, dtype=torch.float64))

    def odd(self, y: Tensor) -> Tensor:
        self.scale.data.clamp_(0.0, 2.0)
        return y * self.scale


class _WithMean(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.mean: Tensor


class AssignedBuffer(_WithMean):
    def odd(self, y: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class AveragedBuffer(_WithMean):
    def odd(self, y: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean


class CountedBuffer(_WithMean):
    """A buffer that changes without any tensor of the batch."""

    def odd(self, y: Tensor) -> Tensor:
        self.mean += 1
        return y / self.mean.mean()


class AverageOfWeights(Body):
    """A teacher whose weights follow those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = linear().requires_grad_(False)

    def odd(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.second.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            wanted = self.teacher(y)
        return y.tanh() + wanted


class LateChange(Body):
    """Changes what only a later layer reads, before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = linear().requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.1)
        self.second.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)

    def odd(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(y)
        return (y.tanh() + wanted) / self.calls.sqrt()


class Codebook(Body):
    """Vector quantisation whose codes are moving averages of what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 5 * WIDTH, dtype=torch.float64).view(5, WIDTH))
        self.codes: Tensor

    def odd(self, y: Tensor) -> Tensor:
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        code = self.codes[nearest]
        if self.training:
            chosen = functional.one_hot(nearest, 5).to(y.dtype)
            sums, counts = chosen.t() @ y.detach(), chosen.sum(0)
            mean = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], self.codes)
            self.codes.mul_(0.9).add_(mean, alpha=0.1)
        return y + (code - y).detach() + 0.1 * (y - code)


class Queue(Body):
    """A queue of past batches with a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.linspace(-1, 1, 12 * WIDTH, dtype=torch.float64).view(12, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.queue: Tensor
        self.pointer: Tensor

    def odd(self, y: Tensor) -> Tensor:
        scores = y @ self.queue.clone().detach().t()
        place = int(self.pointer)
        rows = torch.arange(place, place + y.shape[0]) % 12
        self.queue[rows] = y.detach()
        self.pointer[0] = (place + y.shape[0]) % 12
        return functional.pad(scores[:, :WIDTH].tanh(), (0, 0)) + y


# State that Python keeps


class Counter(Body):
    calls = 0

    def odd(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y * min(1.0, self.calls / 8)


class KeptState(Body):
    """A hidden state from call to call."""

    state: Tensor | None = None

    def odd(self, y: Tensor) -> Tensor:
        z = y.tanh() if self.state is None else y.tanh() + 0.5 * self.state
        self.state = z.detach().mean(0)
        return z


class KeptList(Body):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def odd(self, y: Tensor) -> Tensor:
        self.seen.append(1)
        return y * len(self.seen)


class KeptTensor(Body):
    """A moving average that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH, dtype=torch.float64)

    def odd(self, y: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean


class KeptListOfTensors(Body):
    def __init__(self) -> None:
        super().__init__()
        self.means = [torch.zeros(WIDTH, dtype=torch.float64)]

    def odd(self, y: Tensor) -> Tensor:
        self.means[0] = 0.9 * self.means[0] + 0.1 * y.detach().mean(0)
        return y - self.means[0]


class _Count:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class KeptObject(Body):
    """A counter in an object without a dictionary of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = _Count()

    def odd(self, y: Tensor) -> Tensor:
        self.count.calls += 1
        return y * self.count.calls


class SideTerm(Body):
    """Keeps a tensor as an attribute only to read it in the same forward."""

    side: Tensor

    def odd(self, y: Tensor) -> Tensor:
        self.side = y.mean(1, keepdim=True)
        return y.tanh() + self.side


class LayerDrop(Body):
    def odd(self, y: Tensor) -> Tensor:
        return y if random.random() < 0.5 else y.tanh()


class TensorLayerDrop(Body):
    def odd(self, y: Tensor) -> Tensor:
        return y if torch.rand(1).item() < 0.5 else y.tanh()


class FixedNoise(Body):
    """Noise whose shape depends on no input."""

    def odd(self, y: Tensor) -> Tensor:
        return y + torch.randn(WIDTH, dtype=torch.float64)


class SizeAlone(Body):
    """A layer that reads nothing of the batch but its size."""

    def odd(self, y: Tensor) -> Tensor:
        return y + self.first(torch.ones(y.shape[0], WIDTH, dtype=y.dtype))


class NumpyNumber(Body):
    def odd(self, y: Tensor) -> Tensor:
        return y * numpy.float64(0.5)


class BatchBranch(Body):
    def odd(self, y: Tensor) -> Tensor:
        return y.tanh() if y.shape[0] > 2 else y.sigmoid()


class ValueBranch(Body):
    def odd(self, y: Tensor) -> Tensor:
        return y.tanh() if y.sum() > 0 else y.sigmoid()


class Cache(Body):
    """A table made at the first call, and made anew for more rows."""

    table: Tensor | None = None

    def odd(self, y: Tensor) -> Tensor:
        if self.table is None or len(self.table) < y.shape[1]:
            self.table = torch.arange(y.shape[1], dtype=y.dtype)
        return y + self.table


# Parameters


class SpectralNorm(Body):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.second)


class OldSpectralNorm(Body):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.second)


class WeightNorm(Body):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.second)


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrized(Body):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.first, "weight", _Symmetric())


class ParametrizedSelf(Body):
    """A parametrized parameter of a module with layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))
        parametrize.register_parametrization(self, "mix", _Symmetric())

    def odd(self, y: Tensor) -> Tensor:
        return y @ self.mix


class Unrolled(Body):
    """A recurrent cell, step after step."""

    def odd(self, y: Tensor) -> Tensor:
        state = torch.zeros_like(y)
        for _ in range(3):
            state = (self.first(y) + self.second(state)).tanh()
        return state


class UnrolledGRU(Body):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH, dtype=torch.float64)

    def odd(self, y: Tensor) -> Tensor:
        state = y
        for step in range(3):
            state = self.cell(y * (step + 1), state)
        return state


class Universal(Body):
    """The same two layers, three times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.second(self.first(x).tanh())
        return x


class TiedFunctional(Body):
    def odd(self, y: Tensor) -> Tensor:
        return functional.linear(y, self.first.weight.t()).tanh()


class UnusedParameter(Body):
    def __init__(self) -> None:
        super().__init__()
        self.idle, self.bare = linear(), nn.Parameter(torch.zeros(3, dtype=torch.float64))


class BareParameter(Body):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((1, WIDTH), 0.3, dtype=torch.float64))

    def odd(self, y: Tensor) -> Tensor:
        both = torch.cat([self.token.expand(y.shape[0], -1), y], 1)
        return both[:, 4 : 4 + WIDTH].tanh()


class Renormalised(Body):
    """Batch renormalisation, whose forward reads the statistics of earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.running_mean: Tensor

    def odd(self, y: Tensor) -> Tensor:
        mean = y.mean(0)
        shift = (mean - self.running_mean).detach()
        self.running_mean.lerp_(mean.detach(), 0.1)
        return y - mean + shift


class LimitedNorms(Body):
    """An embedding whose forward shortens the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(2, WIDTH, max_norm=0.5, dtype=torch.float64)

    def odd(self, y: Tensor) -> Tensor:
        return y + self.kinds((y[:, 0] > 0).long())


class BatchNormalised(Body):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def odd(self, y: Tensor) -> Tensor:
        z: Tensor = self.norm(y)
        return z.relu_()


class FunctionalBatchNorm(_WithMean):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.ones(WIDTH, dtype=torch.float64))
        self.variance: Tensor

    def odd(self, y: Tensor) -> Tensor:
        return functional.batch_norm(y, self.mean, self.variance, training=self.training)


# Types, devices and modes


class HalfInside(Body):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def odd(self, y: Tensor) -> Tensor:
        z: Tensor = self.low(y.to(torch.bfloat16))
        return z.to(y.dtype).tanh()


class AutocastInside(Body):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH)

    def odd(self, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z: Tensor = self.low(y.float())
        return z.to(y.dtype).tanh()


class ComplexInside(Body):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(WIDTH, 2, dtype=torch.float64))
        self.tanh = nn.Tanh()

    def odd(self, y: Tensor) -> Tensor:
        spectrum = torch.fft.fft(y) * torch.view_as_complex(self.filter)
        z: Tensor = self.tanh(y)
        return torch.fft.ifft(spectrum).real + z


class ComplexLayer(Body):
    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def odd(self, y: Tensor) -> Tensor:
        z: Tensor = self.spectral(torch.fft.fft(y))
        return z.abs()


class Mapped(Body):
    def odd(self, y: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.tanh() * row.sum())(y)


class GradientInside(Body):
    """The gradient of an energy by its input, as in force fields and gradient penalties."""

    def odd(self, y: Tensor) -> Tensor:
        with torch.enable_grad():
            z = y if y.requires_grad else y.detach().requires_grad_()
            energy = self.second(z).pow(2).sum()
            (force,) = torch.autograd.grad(energy, z, create_graph=True)
        return y - 0.1 * force


class NoGradInside(Body):
    def odd(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.second(y).sigmoid()
        return y * gate


class InferenceInside(Body):
    def odd(self, y: Tensor) -> Tensor:
        with torch.inference_mode():
            gate = y.sigmoid().sum().item()
        return y * gate / 100


class FrozenInForward(Body):
    def odd(self, y: Tensor) -> Tensor:
        self.first.weight.requires_grad_(False)
        return y.tanh()


# Changes in place


class InPlace(Body):
    def odd(self, y: Tensor) -> Tensor:
        return functional.relu_(y)


class InPlaceView(Body):
    def odd(self, y: Tensor) -> Tensor:
        z = y * 2
        z[:, :4] = z[:, 4:].tanh()
        z[:, 0].add_(1)
        return z


# Sizes that depend on data


class Selected(Body):
    def odd(self, y: Tensor) -> Tensor:
        chosen = self.second(y[y.sum(1) > 0])
        return y + chosen.sum(0)


class Nonzero(Body):
    def __init__(self) -> None:
        super().__init__()
        self.third = linear(1, 3)

    def odd(self, y: Tensor) -> Tensor:
        positive = torch.masked_select(y, y > 0).unsqueeze(1)
        return y + self.third(positive).mean()


class Graph(Body):
    """Messages along the edges of a ring."""

    def odd(self, y: Tensor) -> Tensor:
        source = torch.arange(y.shape[0])
        target = (source + 1) % y.shape[0]
        return torch.zeros_like(y).index_add(0, target, self.second(y)[source])


BODIES: tuple[type[Body], ...] = (
    GradientReversal, StraightThrough, FakeQuantised, DetachTrick, Reentrant, NotReentrant, TensorHook, PlainTensorHook,
    ContainerForwardHook, ContainerForwardPreHook, ContainerBackwardHook, ContainerBackwardPreHook, LeafForwardHook,
    LeafBackwardHook, OwnBackwardHook, OwnForwardHook, RecordingHook, ParameterHook, AfterAccumulationHook, OutArgument,
    ClampedWeight, NormalisedWeight, ClampedWithoutLayer, AssignedBuffer, AveragedBuffer, CountedBuffer,
    AverageOfWeights, LateChange, Codebook, Queue, Counter, KeptState, KeptList, KeptTensor, KeptListOfTensors, KeptObject,
    SideTerm, LayerDrop, TensorLayerDrop, FixedNoise, SizeAlone, NumpyNumber, BatchBranch, ValueBranch, Cache, SpectralNorm, OldSpectralNorm, WeightNorm,
    Parametrized, ParametrizedSelf, Unrolled, UnrolledGRU, Universal, TiedFunctional, UnusedParameter, BareParameter,
    Renormalised, LimitedNorms, BatchNormalised, FunctionalBatchNorm, HalfInside, AutocastInside, ComplexInside, ComplexLayer, Mapped,
    GradientInside, NoGradInside, InferenceInside, FrozenInForward, InPlace, InPlaceView, Selected,
    Nonzero, Graph,
)  # fmt: skip


IN_ROOT: tuple[type[Body], ...] = (
    GradientReversal, FakeQuantised, Reentrant, PlainTensorHook, OwnForwardHook, OutArgument, AssignedBuffer,
    AveragedBuffer, LateChange, Codebook, Counter, KeptList, KeptTensor, KeptObject, LayerDrop, SizeAlone, NumpyNumber, AutocastInside, ComplexInside, Selected,
)  # fmt: skip
"""The bodies whose code is also tried as a network's own forward."""


def nested(body: type[Body]) -> nn.Module:
    return nn.Sequential(linear(6, WIDTH), nn.Tanh(), body(), nn.Tanh(), linear(WIDTH, 5))


def rooted(body: type[Body]) -> nn.Module:
    class Rooted(body):  # type: ignore[valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = linear(6, WIDTH), linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(super().forward(self.stem(x).tanh()))
            return y

    Rooted.__name__ = f"Rooted{body.__name__}"
    return Rooted()


# Whole models with odd inputs or results


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH, sparse=True, dtype=torch.float64)
        self.mix, self.head = linear(), linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.mix(self.embed(x).mean(1)).tanh())
        return y


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH, dtype=torch.float64)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, dtype=torch.float64)
        self.head = linear(WIDTH, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        z: Tensor = self.head(y.mean(1))
        return z


class States(nn.Module):
    """The states of a recurrent layer go on, and are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, WIDTH, batch_first=True, dtype=torch.float64)
        self.second = nn.LSTM(6, WIDTH, batch_first=True, dtype=torch.float64)
        self.head = linear(WIDTH, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        _, state = self.first(x)
        y, state = self.second(x, state)
        return self.head(y[:, -1]), state


@dataclass
class Record:
    scores: Tensor
    side: Tensor | None = None
    name: str = "record"


class Named(NamedTuple):
    scores: Tensor
    side: Tensor | None
    size: int


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(6, WIDTH), linear(), linear(WIDTH, 5)

    def run(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x).tanh()).tanh())
        return y


class ReturnsRecord(_Plain):
    def forward(self, x: Tensor) -> Record:
        return Record(self.run(x))


class ReturnsNamed(_Plain):
    def forward(self, x: Tensor) -> Named:
        return Named(self.run(x), None, 3)


class ReturnsInput(_Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, str]:
        return self.run(x), x, "name"


class ReturnsTwice(_Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.run(x)
        return y, y, y[:, :2]


class ReturnsConstant(_Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(x), torch.ones(2, dtype=torch.float64)


class Starred(_Plain):
    def forward(self, *args: Tensor) -> Tensor:
        return self.run(args[0] + args[1])


class Keywords(_Plain):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        y = self.run(x)
        return y * kwargs["scale"] if "scale" in kwargs else y


class OptionalInput(_Plain):
    def forward(self, x: Tensor, flag: bool = True, mask: Tensor | None = None) -> Tensor:
        y = self.run(x)
        return y if mask is None or not flag else y * mask


class Edges(nn.Module):
    """A graph per sample, by its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.send, self.head = linear(6, WIDTH), linear(), linear(WIDTH, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = self.embed(x)
        sent = self.send(torch.gather(y, 1, edges[..., :1].expand(-1, -1, WIDTH)))
        y = y.scatter_add(1, edges[..., 1:].expand(-1, -1, WIDTH), sent)
        scores: Tensor = self.head(y.tanh().mean(1))
        return scores


class ComplexCut(nn.Module):
    """A complex tensor between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = linear(6, WIDTH), linear(WIDTH, 5)
        self.b = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)
        self.d = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.d(self.b(torch.fft.fft(self.a(x)))).abs())
        return y


def _rows(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, 6, dtype=torch.float64),)


def scores_loss(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of the first tensor of a result, whatever holds it, and of the squares of the others."""
    if isinstance(output, Record):
        output = (output.scores, output.side)
    leaves = [output] if isinstance(output, Tensor) else _tensors(output)
    others = [leaf for leaf in leaves[1:] if leaf.is_floating_point()]
    return functional.cross_entropy(leaves[0], target) + sum((0.1 * leaf.pow(2).mean() for leaf in others), start=0.0)


def _tensors(nest: Any) -> list[Tensor]:
    if isinstance(nest, Tensor):
        return [nest]
    return [leaf for one in nest for leaf in _tensors(one)] if isinstance(nest, list | tuple) else []


@dataclass(frozen=True)
class Odd:
    """A model and its inputs for n samples; the target is one of five classes."""

    make: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, ...]] = _rows


def _ids(n: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 10, (n, 4)),)


ODD: dict[str, Odd] = {
    **{f"nested {body.__name__}": Odd(lambda body=body: nested(body)) for body in BODIES},
    **{f"rooted {body.__name__}": Odd(lambda body=body: rooted(body)) for body in IN_ROOT},
    "Sparse": Odd(Sparse, _ids),
    "Packed": Odd(Packed, lambda n: (*_ids(n), torch.randint(1, 5, (n,)))),
    "States": Odd(States, lambda n: (torch.randn(n, 4, 6, dtype=torch.float64),)),
    "ReturnsRecord": Odd(ReturnsRecord),
    "ReturnsNamed": Odd(ReturnsNamed),
    "ReturnsInput": Odd(ReturnsInput),
    "ReturnsTwice": Odd(ReturnsTwice),
    "ReturnsConstant": Odd(ReturnsConstant),
    "Starred": Odd(Starred, lambda n: (*_rows(n), *_rows(n))),
    "Keywords": Odd(Keywords),
    "OptionalInput": Odd(OptionalInput),
    "SingleLayer": Odd(lambda: linear(6, 5)),
    "Edges": Odd(Edges, lambda n: (torch.randn(n, 3, 6, dtype=torch.float64), torch.randint(0, 3, (n, 4, 2)))),
    "ComplexCut": Odd(ComplexCut),
}
