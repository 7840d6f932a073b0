"""The replicas of a stage: their gradients summed while the backward still runs, their buffers made one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.runtime.clock import Clock
from bapipe.simulator.stage_cost import fill_buckets

_LARGE_BYTES = 2**20
"""Gradients of so many bytes are summed where they lie; copying them together would cost more than a message."""


@dataclass(slots=True)
class _Reduction:
    """A bucket of one type on its way: `large` gradients of some parameters, and `flat` those of the others.

    After them `flat` holds for each parameter, the large ones first, whether any replica has a gradient.
    """

    bucket: int
    parameters: list[nn.Parameter]
    large: list[Tensor]
    flat: Tensor
    works: list[dist.Work]
    start: object
    end: object | None = None

    @property
    def num_bytes(self) -> int:
        return self.flat.nbytes + sum(grad.nbytes for grad in self.large)


class GradientSum:
    """Sums the gradients of a stage's replicas once a step.

    By all-reduce, in the judge's buckets: those of the last layers first, at least 25 MiB each.
    A bucket starts when the stage's last backward on this rank has filled it, after all earlier ones. Losses are
    divided by the number of all micro-batches, so the sum is the mini-batch's mean.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup, clock: Clock) -> None:
        """`layers` holds the trained parameters of each layer, in the stage's order."""
        self._group, self._clock = group, clock
        self._buckets = _buckets(layers)
        self._left: list[int] = []
        self._started: list[_Reduction] = []
        self._next, self._done = 0, False
        for index, parameters in enumerate(self._buckets):
            for parameter in parameters:
                arrived = partial(self._arrived, index)
                parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Within it the gradients that arrive are final, so full buckets start."""
        self._left = [len(parameters) for parameters in self._buckets]
        try:
            yield
        finally:
            self._left = []

    def finish(self) -> None:
        """Starts what has not started, and gives every parameter its summed gradient; once is enough."""
        if self._done:
            return
        self._done = True
        while self._next < len(self._buckets):
            self._start(self._next)
        for reduction in self._started:
            for work in reduction.works:
                work.wait()
            reduction.end = self._clock.stamp()
            _take(reduction)

    def syncs(self) -> list[tuple[int, int, object, object]]:
        """Returns (bucket, bytes, start, end) of the last step's all-reduces; the end is when this rank saw it."""
        return [(r.bucket, r.num_bytes, r.start, r.end) for r in self._started]

    def begin(self) -> None:
        """Before a step: lets go of the last one."""
        self._started, self._next, self._done = [], 0, False

    def _arrived(self, bucket: int, _: Tensor) -> None:
        if not self._left:
            return
        self._left[bucket] -= 1
        while self._next < len(self._buckets) and self._left[self._next] == 0:
            self._start(self._next)

    def _start(self, bucket: int) -> None:
        self._next = bucket + 1
        for dtype in dict.fromkeys(parameter.dtype for parameter in self._buckets[bucket]):
            own = [parameter for parameter in self._buckets[bucket] if parameter.dtype == dtype]
            parameters = sorted(own, key=lambda parameter: parameter.nbytes < _LARGE_BYTES)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            has = torch.tensor([p.grad is not None for p in parameters]).to(grads[0])
            num_large = sum(parameter.nbytes >= _LARGE_BYTES for parameter in parameters)
            with torch.no_grad():
                large = [grad.contiguous() for grad in grads[:num_large]]
                flat = torch.cat([*(grad.reshape(-1) for grad in grads[num_large:]), has])
            start = self._clock.stamp()
            works = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in (*large, flat)]
            self._started.append(_Reduction(bucket, parameters, large, flat, works, start))


def _take(reduction: _Reduction) -> None:
    """A parameter that no replica has a gradient for keeps none, as in one process."""
    small = reduction.parameters[len(reduction.large) :]
    pieces = torch.split(reduction.flat, [*(parameter.numel() for parameter in small), len(reduction.parameters)])
    summed = [*reduction.large, *(piece.view_as(own) for piece, own in zip(pieces, small, strict=False))]
    for parameter, grad, has in zip(reduction.parameters, summed, pieces[-1].tolist(), strict=True):
        if parameter.grad is not None or has:
            parameter.grad = grad


def _buckets(layers: Sequence[Sequence[nn.Parameter]]) -> list[list[nn.Parameter]]:
    backwards = list(reversed(layers))
    buckets, begin = [], 0
    for end, _ in fill_buckets([sum(p.nbytes for p in layer) for layer in backwards]):
        buckets.append([parameter for layer in backwards[begin:end] for parameter in reversed(layer)])
        begin = end
    return buckets


class SharedBuffers:
    """Makes the buffers of a stage's replicas one after every step.

    Each replica's batch norm sees its own micro-batches. Afterwards a floating-point buffer is the mean over the
    replicas, weighted by their micro-batches, and an integer one has every replica's change: running statistics
    follow all of the data, and counts are those of one process. What the first step leaves alone is a constant.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, share: float) -> None:
        """`share` is the part of the micro-batches that this replica runs."""
        self._buffers, self._group, self._share = dict(module.named_buffers()), group, share
        self._known = False
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Before a step: remembers what it needs."""
        kept = {n: b for n, b in self._buffers.items() if not (self._known and b.is_floating_point())}
        self._before = {name: buffer.clone() for name, buffer in kept.items()}

    def finish(self) -> None:
        """After a step: makes the buffers one."""
        if not self._known and self._buffers:
            self._find_changing()
        floats = [buffer for buffer in self._buffers.values() if buffer.is_floating_point()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in floats):
            own = [buffer for buffer in floats if buffer.dtype == dtype]
            self._add_up(own, [buffer * self._share for buffer in own])
        counts = {name: buffer for name, buffer in self._buffers.items() if not buffer.is_floating_point()}
        if counts:
            changes = [buffer.long() - self._before[name].long() for name, buffer in counts.items()]
            for name, buffer in counts.items():
                buffer.copy_(self._before[name])
            self._add_up(list(counts.values()), changes, keep=True)
        self._before = {}

    def _find_changing(self) -> None:
        changed = [not torch.equal(self._before[name], buffer) for name, buffer in self._buffers.items()]
        flags = torch.tensor(changed, dtype=torch.int32, device=next(iter(self._buffers.values())).device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        self._buffers = {name: b for (name, b), flag in zip(self._buffers.items(), flags.tolist(), strict=True) if flag}
        self._known = True

    def _add_up(self, buffers: Sequence[Tensor], parts: Sequence[Tensor], keep: bool = False) -> None:
        """Sets buffers to the sum of their parts over the replicas, or adds it where they keep what they are."""
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=self._group)
        totals = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, total in zip(buffers, totals, strict=True):
            value = total.view_as(buffer)
            buffer.copy_(buffer + value.to(buffer.dtype) if keep else value)


class Replicas:
    """The place of a rank among the replicas of one stage; made, and used, by all of them together."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[Sequence[nn.Parameter]],
        group: dist.ProcessGroup,
        share: float,
        clock: Clock,
    ) -> None:
        """Gives the module the first replica's values; see `GradientSum` and `SharedBuffers`."""
        for tensor in (*module.parameters(), *module.buffers()):
            value = tensor.detach().contiguous()
            dist.broadcast(value, group=group, group_src=0)
            tensor.detach().copy_(value)
        self._group = group
        self.gradients = GradientSum(layers, group, clock)
        self.buffers = SharedBuffers(module, group, share)

    def begin(self) -> None:
        """Before a step."""
        self.gradients.begin()
        self.buffers.begin()

    def total(self, part: Tensor) -> Tensor:
        """Returns the sum of what each replica gives."""
        dist.all_reduce(part, group=self._group)
        return part
