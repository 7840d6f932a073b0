"""The replicas of a stage: all-reduce of their gradients during the last backward, and equal state after each step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bapipe.errors import InvalidModel
from bapipe.job.groups import wait
from bapipe.runtime.clock import Clock
from bapipe.runtime.replica_state import BufferAverage, LossOfReplicas
from bapipe.simulator.stage_cost import fill_buckets

_LARGE_BYTES = 2**20
"""Gradients of this size or more are summed in place: copying them to a flat tensor would cost more than a message."""


@dataclass(slots=True)
class _Reduction:
    """The all-reduce of the gradients of one dtype in a bucket, which runs or has run.

    Attributes:
        parameters: the parameters of that dtype, the large ones first.
        large: gradients of large parameters, summed in place.
        flat: the other gradients, concatenated; then for each of `parameters` 1 if it has a gradient, which sums to the
            number of replicas on which it has one.
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


def broadcast(tensor: Tensor, group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Copies the values of a tensor without a graph from one process of a group to all others, in place.

    Args:
        group: None is the default group.
        source: the rank in the group of the process that has the values.
    """
    value = tensor.contiguous()
    as_bytes = value.reshape(-1).view(torch.uint8)  # gloo does not support all dtypes
    dist.broadcast(as_bytes, group=group, group_src=source)
    tensor.copy_(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHook:
    """A hook on a parameter's gradient that calls `arrived` with the parameter's bucket and its index in that."""

    arrived: Callable[[int, int], None]
    bucket: int
    index: int

    def __call__(self, parameter: Tensor) -> None:
        self.arrived(self.bucket, self.index)


class GradientSum:
    """Sums the gradients of a stage's replicas once per step, by all-reduce in buckets.

    The buckets are those of the simulator: the last layers first, at least 25 MiB each. A bucket's all-reduce starts
    during the stage's last backward on this rank, as soon as all of its gradients are final and all earlier buckets
    have started, so that all replicas call them in one order. Gradients may come in several parts, as where a layer
    calls re-entrant checkpoints with one weight; that is learnt in the first step, in which all buckets start after the
    backward, and such buckets do so in every step. Losses are divided by the number of all micro-batches,
    so the sum is the gradient of the mini-batch's mean.

    Why not DistributedDataParallel, which torch's PipelineStage supports:

    - A plan promises a time for the simulator's buckets. DDP's first bucket has 1 MiB, and after the first step it
      rebuilds the buckets in the order in which gradients arrived.
    - Micro-batches go to the replicas in turn, so replicas may run different numbers of them. torch lets DDP reduce in
      the last backward, which it finds by counting all micro-batches of the schedule: a replica never runs so many.
    - DDP's hooks belong to nodes of the autograd graph that W does not run.
    - A parameter for which no replica has a gradient must keep none, so that the optimizer skips it, as in one process.
      DDP does that only with `find_unused_parameters`, which searches the graph in every backward.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup, clock: Clock) -> None:
        """`layers` are the trained parameters of each layer, in the stage's order."""
        self._group, self._clock = group, clock
        self._buckets = _buckets(layers)
        self._missing: list[set[int]] = []  # gradients per bucket still to come; empty outside the last backward
        self._in_parts: set[int] = set()  # buckets with a gradient that came several times in a backward
        self._num_steps = 0
        self._started: list[_Reduction] = []
        self._next, self._done = 0, False  # the next bucket to start
        self._sparse: dict[int, nn.Parameter] = {}  # parameters with sparse gradients, by id
        self._hooks: list[RemovableHandle] = []
        for index, parameters in enumerate(self._buckets):
            for number, parameter in enumerate(parameters):
                hook = BucketHook(arrived=self._arrived, bucket=index, index=number)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove_hooks(self) -> None:
        """Removes the hooks of the parameters, after the last step."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """In this context runs the backward that makes gradients final: each bucket starts when it is complete."""
        self._missing = [set(range(len(parameters))) for parameters in self._buckets]
        try:
            yield
        finally:
            self._missing = []

    def start(self) -> None:
        """Starts the buckets that have not started yet."""
        while self._next < len(self._buckets):
            self._start(self._next)

    def finish(self) -> None:
        """Gives every parameter its summed gradient, once all buckets have started; later calls do nothing."""
        if self._done:
            return
        self._done = True
        for reduction in self._started:
            for work in reduction.works:
                wait(work, self._group)
            reduction.end = self._clock.stamp()
            _assign_gradients(reduction)
        self._make_sparse()

    def syncs(self) -> list[tuple[int, int, object, object]]:
        """Returns (bucket, bytes, start, end) of the last step's all-reduces; the end is when this rank saw it."""
        return [(r.bucket, r.num_bytes, r.start, r.end) for r in self._started]

    def begin(self) -> None:
        """Resets the state, before a step."""
        self._started, self._next, self._done = [], 0, False
        self._num_steps += 1

    def _make_dense(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes sparse gradients, which an all-reduce cannot sum, dense until they are summed."""
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._sparse[id(parameter)] = parameter
                parameter.grad = parameter.grad.to_dense()

    def _make_sparse(self) -> None:
        for parameter in self._sparse.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(1)

    def _arrived(self, bucket: int, index: int) -> None:
        if not self._missing:
            return
        if index not in self._missing[bucket]:
            if bucket < self._next:
                raise InvalidModel(
                    "the gradient of a parameter came again in a backward in which its sum over replicas had begun, as "
                    "it did not in the first step: use torch.utils.checkpoint with use_reentrant=False, or plan "
                    "without replicas"
                )
            self._in_parts.add(bucket)
        self._missing[bucket].discard(index)
        while self._num_steps > 1 and self._next < len(self._buckets) and self._is_final(self._next):
            self._start(self._next)

    def _is_final(self, bucket: int) -> bool:
        return not self._missing[bucket] and bucket not in self._in_parts

    def _start(self, bucket: int) -> None:
        self._next = bucket + 1
        for dtype in dict.fromkeys(parameter.dtype for parameter in self._buckets[bucket]):
            of_dtype = [parameter for parameter in self._buckets[bucket] if parameter.dtype == dtype]
            parameters = sorted(of_dtype, key=lambda parameter: parameter.nbytes < _LARGE_BYTES)
            self._make_dense(parameters)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            # Set on the device: a copy from the host would wait for all work queued on the device.
            has_grad = grads[0].new_ones(len(parameters))
            for index in (i for i, parameter in enumerate(parameters) if parameter.grad is None):
                has_grad[index] = 0
            num_large = sum(parameter.nbytes >= _LARGE_BYTES for parameter in parameters)
            with torch.no_grad():
                large = [grad.contiguous() for grad in grads[:num_large]]
                flat = torch.cat([*(grad.reshape(-1) for grad in grads[num_large:]), has_grad])
            start = self._clock.stamp()
            works = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in (*large, flat)]
            self._started.append(_Reduction(bucket, parameters, large, flat, works, start))


def _assign_gradients(reduction: _Reduction) -> None:
    """Sets the summed gradients; a parameter for which no replica has a gradient keeps none, as in one process."""
    small = reduction.parameters[len(reduction.large) :]
    parts = torch.split(reduction.flat, [*(parameter.numel() for parameter in small), len(reduction.parameters)])
    summed = [*reduction.large, *(part.view_as(parameter) for part, parameter in zip(parts, small, strict=False))]
    if all(parameter.grad is not None for parameter in reduction.parameters):
        num_replicas = [1] * len(summed)  # at least this one; reading the sums would wait for the device
    else:
        num_replicas = parts[-1].tolist()
    for parameter, grad, num in zip(reduction.parameters, summed, num_replicas, strict=True):
        if num:
            parameter.grad = grad


def _buckets(layers: Sequence[Sequence[nn.Parameter]]) -> list[list[nn.Parameter]]:
    backwards = list(reversed(layers))  # the order in which a backward finishes them
    buckets, begin = [], 0
    for end, _ in fill_buckets([sum(p.nbytes for p in layer) for layer in backwards]):
        buckets.append([parameter for layer in backwards[begin:end] for parameter in reversed(layer)])
        begin = end
    return buckets


class Replicas:
    """This rank's share in the replicas of a stage; all replicas make it and call its methods together."""

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        layers: Sequence[Sequence[nn.Parameter]],
        group: dist.ProcessGroup,
        share: float,
        clock: Clock,
        loss: object = None,
    ) -> None:
        """Gives the module the first replica's values; for `layers` and `share` see `GradientSum` and `BufferAverage`.

        `loss` is the loss for the last stage, None for others.
        """
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(tensor.detach(), group)
        self._group = group
        self._buffers = BufferAverage(stage, module, group, share)
        self._loss = LossOfReplicas(loss)
        self.gradients = GradientSum(layers, group, clock)  # last, as it adds hooks that are to be removed

    def begin(self) -> None:
        """Prepares for a step."""
        self.gradients.begin()
        self._buffers.begin()
        self._loss.begin()

    def finish(self) -> None:
        """Makes the state of the replicas equal, after a step.

        Raises:
            InvalidModel: forwards changed other state than running statistics, or the loss keeps state.
        """
        self._buffers.finish()
        self._loss.finish()

    def total(self, part: Tensor) -> Tensor:
        """Returns a tensor, summed over the replicas in place."""
        dist.all_reduce(part, group=self._group)
        return part

    def total_of_evaluation(self, part: Tensor) -> Tensor:
        """Returns a tensor, summed over the replicas, which all evaluate.

        No step gathers tensors of one group of replicas, and gloo takes no collective for one of another kind: where
        one replica evaluates while another one steps, both wait, until that is told.
        """
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, part, group=self._group)
        return torch.stack(parts).sum(dim=0)
