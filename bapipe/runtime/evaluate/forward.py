"""Forward passes of a pipeline in evaluation mode: dropout off, batch norm by its running statistics."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.runtime.lowering import receives_first, with_transfers
from bapipe.runtime.split import Split, at_size, split
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.tracing import granularity, trace

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|F)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What a rank of the last stage knows after a forward pass.

    Attributes:
        loss: mean over all samples, those of other ranks included; None where no target was given.
        outputs: of each micro-batch of this rank, what the model returns, or what was kept of it.
        rows: the samples of the mini-batch that each of them is of.
    """

    loss: float | None
    outputs: tuple[Any, ...]
    rows: tuple[range, ...]


def split_for_evaluation(module: nn.Module, plan: Plan, inputs: Sequence[Tensor], training: Split) -> Split:
    """Returns a plan's stages of a model in evaluation mode: a model's code may do other things in it than in training.

    Raises:
        InvalidModel: it then has other layers than the plan, cannot be cut there, or a stage loads another input.
    """
    whole, fine = granularity(module, [name for stage in plan.stages for name in stage.layers])
    with evaluating([module]):
        try:
            parts = split(trace(module, inputs, whole=whole, fine=fine), plan, inputs)
        except InvalidModel as error:
            raise InvalidModel(f"in evaluation mode the model cannot be cut as the plan says: {error}") from error
    for s, (there, here) in enumerate(zip(training.stages, parts.stages, strict=True)):
        for name in set(here.loaded) - set(there.loaded):
            raise InvalidModel(f"in evaluation mode stage {s} needs the input '{name}', which it does not in training")
    return parts


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within it modules and all that they contain are in evaluation mode; afterwards in the mode they were in."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in before:
        part.training = False
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


class Evaluator:
    """The forwards of one rank's stages, each as soon as its inputs are there, with nothing kept for a backward."""

    def __init__(
        self,
        parts: Split,
        plan: Plan,
        ranks: Sequence[int],
        modules: Mapping[int, nn.Module],
        loss: Callable[[Any, Tensor], Tensor],
        total: Callable[[Tensor], Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`ranks[i]` is the plan's rank that process i of the group plays; `modules` are its stages', by stage.

        `loss` is of the tuple that the last stage gives; `total` adds up what the last stage's replicas have.

        Raises:
            InvalidModel: a stage uses a value that no one sets.
        """
        self._parts, self._schedule, self._ranks = parts, plan.table, ranks
        self._size, self._loss, self._total = plan.microbatch_size, loss, total
        self._examples = {plan.microbatch_size: parts.examples}  # of other sizes when they are first met: it takes long
        self._device, self._group = device, group
        self._own = ranks[dist.get_rank(group)]
        self._modules = modules
        for module in modules.values():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_meta:
                    raise InvalidModel(f"'{name}' is used in evaluation mode only, and nothing gives it a value")
            module.to(device)  # what the trace found to be constant; the rest is there

    def run(
        self,
        loaded: Mapping[str, Tensor],
        target: Tensor | None,
        num_samples: int,
        keep: Callable[[Any], Any],
    ) -> Evaluated | None:
        """Returns the mean loss and what `keep` makes of the model's results on the last stage, None elsewhere.

        All ranks of the group call it together.
        """
        rows = [range(start, min(start + self._size, num_samples)) for start in range(0, num_samples, self._size)]
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        kept: dict[int, Any] = {}
        on_cuda = self._device.type == "cuda"
        with (
            torch.no_grad(),
            evaluating([self._parts.model.module, *self._modules.values()]),
            torch.random.fork_rng(devices=[self._device] if on_cuda else []),
        ):
            for m, output in self._results(loaded, rows):
                own = rows[m]
                if target is not None:
                    loss += self._loss(output, target[own.start : own.stop]).double() * (len(own) / num_samples)
                kept[m] = keep(self._parts.model.result.rebuild(output))
        if self._schedule.num_stages - 1 not in self._modules:
            return None
        return Evaluated(
            loss=None if target is None else self._total(loss).item(),
            outputs=tuple(kept.values()),
            rows=tuple(rows[m] for m in kept),
        )

    def _results(self, loaded: Mapping[str, Tensor], rows: Sequence[range]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yields the micro-batches of the last stage on this rank and what they give."""
        passing = _Passing(self._parts, rows, self._examples, self._device, self._group)
        for stage, what, m in self._actions(len(rows)):
            if what == "RECV_F":
                passing.receive(stage, m, self._process(stage - 1, m))
            elif what == "SEND_F":
                passing.send(stage, m, self._process(stage + 1, m))
            else:
                given = [loaded[name][rows[m].start : rows[m].stop] for name in self._parts.stages[stage].loaded]
                outputs = self._modules[stage](*passing.taken(stage, m), *given)
                if stage + 1 < self._schedule.num_stages:
                    passing.made[stage, m] = outputs
                else:
                    yield m, outputs
        passing.finish()

    def _process(self, stage: int, microbatch: int) -> int:
        return self._ranks.index(self._schedule.rank_of(stage, microbatch))

    def _actions(self, num_microbatches: int) -> list[tuple[int, str, int]]:
        """Returns this rank's forwards, sends and receives."""
        lowered = with_transfers(forwards_only(self._schedule, num_microbatches))[self._own]
        if self._device.type == "cpu":
            lowered = receives_first(lowered)
        found = (_ACTION.fullmatch(text) for text in lowered)
        return [(int(match[1]), match[2], int(match[3])) for match in found if match is not None]


def forwards_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Returns the forwards of a schedule's stages, as many micro-batches at once as there are ranks before the next."""
    width = len(schedule.order)
    orders: list[list[Action]] = [[] for _ in schedule.order]
    for first in range(0, num_microbatches, width):
        for s in range(schedule.num_stages):
            for m in range(first, min(first + width, num_microbatches)):
                orders[schedule.rank_of(s, m)].append(Action(s, Phase.FORWARD, m))
    return Schedule(
        devices=schedule.devices, num_microbatches=num_microbatches, order=tuple(tuple(order) for order in orders)
    )


@dataclass(slots=True)
class _Passing:
    """What is on its way between stages; `made` are the outputs of this rank's stages, by stage and micro-batch.

    `examples` are those of the split for each size of a micro-batch that was met so far.
    """

    parts: Split
    rows: Sequence[range]
    examples: dict[int, dict[str, Tensor]]
    device: torch.device
    group: dist.ProcessGroup | None
    made: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    received: dict[tuple[int, int], list[tuple[Tensor, Any]]] = field(default_factory=dict)
    sent: list[tuple[Any, Tensor]] = field(default_factory=list)

    def receive(self, stage: int, microbatch: int, source: int) -> None:
        """Begins to receive what a stage needs of the one before."""
        begun = []
        for name in self.parts.stages[stage].received:
            example = self._example(len(self.rows[microbatch]), name)
            buffer = torch.empty(example.shape, dtype=example.dtype, device=self.device)
            begun.append((buffer, dist.irecv(buffer, group=self.group, group_src=source)))
        self.received[stage, microbatch] = begun

    def taken(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Returns what a stage needs of the one before, when it is there."""
        if stage == 0:
            return ()
        if (stage, microbatch) not in self.received:
            return self.made.pop((stage - 1, microbatch))
        taken = self.received.pop((stage, microbatch))
        for _, work in taken:
            work.wait()
        return tuple(buffer for buffer, _ in taken)

    def send(self, stage: int, microbatch: int, destination: int) -> None:
        """Begins to send what a stage has made."""
        for tensor in self.made.pop((stage, microbatch)):
            self.sent.append((dist.isend(tensor, group=self.group, group_dst=destination), tensor))

    def finish(self) -> None:
        """Returns when all that was sent has arrived."""
        for work, _ in self.sent:
            work.wait()

    def _example(self, size: int, name: str) -> Tensor:
        if size not in self.examples:
            self.examples[size] = at_size(self.parts, size)
        return self.examples[size][name]
