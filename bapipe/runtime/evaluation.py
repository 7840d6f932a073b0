"""Forward passes of a pipeline in evaluation mode: dropout off, batch norm with its running statistics."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bapipe.equivalence.target_weights import counting_alike, weighted_loss
from bapipe.errors import InvalidModel
from bapipe.module_state.code_state import ForwardCode
from bapipe.module_state.modes import evaluation_mode
from bapipe.module_state.python_random import all_generators_restored
from bapipe.module_state.python_state import state_restored
from bapipe.runtime.collectives_check import FirstForwards, action_checked, loss_checked
from bapipe.runtime.lowering import End, Lowered, Transfer, lower_for
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.runtime.rng import PerOperatorRng
from bapipe.runtime.tensor_changes import TensorWrites
from bapipe.runtime.transfers import Channels, Transfers
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.tracing.changing_state import limited_embeddings, limited_embeddings_restored
from bapipe.tracing.stages import Split, at_size


class LossSums(NamedTuple):
    """Sums over micro-batches, from which their mean loss is computed.

    Attributes:
        by_weight, weight: of losses that are means over targets, the sum of loss × total weight of the micro-batch's
            targets, and the sum of these weights.
        by_samples, num_samples: the sum of loss × number of samples, and the number of samples.
        num_means: the number of micro-batches whose loss is a mean over targets.
        num_others: the number of those whose loss computes such a mean without being one, such as a sum of two.
    """

    by_weight: float
    weight: float
    by_samples: float
    num_samples: float
    num_means: float
    num_others: float

    @property
    def mean(self) -> float:
        """The mean over targets if every loss that computes such a mean is one, else over samples; NaN over none."""
        total, weight = self._counted
        return total / weight if weight else nan

    @property
    def mean_weight(self) -> float:
        """The total weight of the targets, or the number of samples, that `mean` is over."""
        return self._counted[1]

    @property
    def _counted(self) -> tuple[float, float]:
        is_mean = self.num_means > 0 and self.num_others == 0
        return (self.by_weight, self.weight) if is_mean else (self.by_samples, self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The result of a forward pass, on a rank of the last stage.

    Attributes:
        losses: sums over all micro-batches, including those of other ranks; None if no target was given.
        outputs: for each micro-batch of this rank, what the model returns, or what `keep` made of it.
        rows: for each of these micro-batches, the indices of its samples in the mini-batch.
    """

    losses: LossSums | None
    outputs: tuple[Any, ...]
    rows: tuple[range, ...]

    @property
    def loss(self) -> float | None:
        """The mean loss, over targets by their weights or over samples, see `LossSums.mean`; None without targets."""
        return None if self.losses is None else self.losses.mean

    @property
    def loss_weight(self) -> float:
        """The number of samples, or the total weight of the targets, that `loss` is the mean over."""
        return 0.0 if self.losses is None else self.losses.mean_weight


@contextmanager
def _unchanged(modules: Sequence[nn.Module], code: Sequence[ForwardCode]) -> Iterator[None]:
    """Restores the state of modules after they have run in this context, and what their `code` keeps outside of them.

    Of parameters only the weights of embeddings with `max_norm`, which forwards change, are copied and restored.

    Raises:
        InvalidModel: another parameter was changed.
    """
    limited = {id(weight) for module in modules for weight in limited_embeddings(module)}
    others = {name: p for module in modules for name, p in module.named_parameters() if id(p) not in limited}
    writes = TensorWrites()
    writes.begin(others)
    with limited_embeddings_restored(*modules), ExitStack() as restored:
        for module in modules:
            restored.enter_context(state_restored(module, outside=False))
        for state in chain.from_iterable(one.states() for one in code):
            restored.callback(state.put_back)
        yield
    for name in sorted(writes.finish() | writes.wait()):
        raise InvalidModel(
            f"the forward changes the parameter '{name}' in evaluation mode, too, so evaluating would change the "
            "trained model: let it do so only if `self.training`"
        )


class ForwardExecutor:
    """Runs the forwards of one rank's stages without gradients, in the order of `forwards_only`."""

    def __init__(
        self,
        layout: ProcessLayout,
        parts: Split,
        modules: Mapping[int, nn.Module],
        *,
        channels: Channels,
        microbatch_size: int,
        loss: nn.Module,
        sum_over_replicas: Callable[[Tensor], Tensor],
        rng: PerOperatorRng,
    ) -> None:
        """`modules` are the modules of this rank's stages, by stage.

        `loss` takes the tuple that the last stage returns, and runs in evaluation mode, too; `sum_over_replicas` sums a
        tensor over the replicas of the last stage; `rng` seeds the operators of `modules` that draw random numbers.

        Raises:
            InvalidModel: a stage uses a parameter or buffer without a value.
        """
        self._layout, self._schedule, self._parts = layout, layout.schedule, parts
        self._channels = channels
        self._size, self._loss, self._sum_over_replicas = microbatch_size, loss, sum_over_replicas
        self._first_forwards = FirstForwards(layout.group)
        self._checked: Callable[[], AbstractContextManager[object]] = partial(
            loss_checked, layout, layout.schedule.num_stages - 1
        )  # of the first loss
        self._examples = {microbatch_size: parts.examples}  # those of other sizes are computed at first use: slow
        self._orders: dict[int, Lowered] = {}  # by number of micro-batches
        self._modules, self._rng = modules, rng
        self._code = [ForwardCode.of(module) for module in (*modules.values(), loss)]  # to find it takes long
        for module in modules.values():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_meta:
                    raise InvalidModel(f"'{name}' is used in evaluation mode only, and nothing gives it a value")
            module.to(layout.device)  # constants of the trace; parameters and buffers are there already

    def run(
        self,
        loaded: Mapping[str, Tensor],
        target: Tensor | None,
        num_samples: int,
        keep: Callable[[Any], Any],
        step: int,
        num_before: int,
    ) -> ForwardResult | None:
        """Returns the losses and what `keep` makes of each output on ranks of the last stage, None on others.

        All ranks of the group call it together. `loaded` are the model inputs that this rank needs, by name. Random
        numbers depend on `step`, that of training, and on `num_before`, the micro-batches evaluated before at that
        step, but not on the rank.

        Raises:
            InvalidModel: a forward changes a parameter.
        """
        self._channels.begin()
        device, self._rng.step = self._layout.device, step
        rows = [range(start, min(start + self._size, num_samples)) for start in range(0, num_samples, self._size)]
        sums = torch.zeros(len(LossSums._fields), dtype=torch.float64, device=device)
        kept: dict[int, Any] = {}
        with (
            torch.no_grad(),
            evaluation_mode([self._parts.model.module, *self._modules.values(), self._loss]),
            _unchanged([*self._modules.values(), self._loss], self._code),
            all_generators_restored(device),
        ):
            for m, output in self._results(loaded, rows, num_before):
                samples = rows[m]
                if target is not None:
                    self._rng.enter_loss()
                    sums += self._loss_sums(output, target[samples.start : samples.stop])
                kept[m] = keep(self._parts.model.result.rebuild(output))
        if self._schedule.num_stages - 1 not in self._modules:
            return None
        return ForwardResult(
            losses=None if target is None else LossSums(*self._sum_over_replicas(sums).tolist()),
            outputs=tuple(kept.values()),
            rows=tuple(rows[m] for m in kept),
        )

    def _loss_sums(self, output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Returns what a micro-batch adds to the fields of `LossSums`, in their order. [6]"""
        with self._checked():
            found = weighted_loss(self._loss, output, target, counting_alike(target.device))
        self._checked = nullcontext
        loss, weight = found.value.double(), found.weight
        zero, num = torch.zeros_like(loss), torch.full_like(loss, len(target))
        by_weight = zero if weight is None else torch.where(weight > 0, loss * weight, zero)
        is_mean, is_other = weight is not None, weight is None and bool(found.weights)
        flags = (torch.full_like(loss, float(flag)) for flag in (is_mean, is_other))
        return torch.stack([by_weight, zero if weight is None else weight, loss * num, num, *flags])

    def _results(
        self, loaded: Mapping[str, Tensor], rows: Sequence[range], num_before: int
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Runs this rank's forwards and transfers; yields (micro-batch, output) of the last stage."""
        order = self._order(len(rows))
        transfers = Transfers(self._channels, limited_sends(order, len(self._schedule.order)))
        tensors = _StageTensors(self._parts, rows, self._examples, self._layout.device)
        for action in order:
            stage, m = action.stage, action.microbatch
            if isinstance(action, Transfer):
                is_send = action.end is End.SEND
                peer = self._layout.process_of(stage + 1 if is_send else stage - 1, m)
                own = tensors.sent(stage, m) if is_send else tensors.receiving(stage, m)
                transfers.post(action, [(tensor, peer) for tensor in own])
            else:
                inputs = [loaded[name][rows[m].start : rows[m].stop] for name in self._parts.stages[stage].loaded]
                self._rng.enter(action._replace(microbatch=num_before + m))
                transfers.before(action)
                received = tensors.inputs(stage, m)
                checked = self._first_forwards.checked(stage, self._modules[stage])
                with action_checked(self._layout, action), checked:
                    outputs = self._modules[stage](*received, *inputs)
                if stage + 1 < self._schedule.num_stages:
                    tensors.outputs[stage, m] = outputs
                else:
                    yield m, outputs
        transfers.release_all()

    def _order(self, num_microbatches: int) -> Lowered:
        """Returns this rank's forwards and transfers; they are lowered once, as most batches have as many samples."""
        if num_microbatches not in self._orders:
            schedule = forwards_only(self._schedule, num_microbatches)
            self._orders[num_microbatches] = lower_for(schedule, gloo=self._layout.uses_gloo)[self._layout.rank]
        return self._orders[num_microbatches]


def forwards_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Returns a schedule of the same stages with forwards only, in waves of as many micro-batches as there are ranks.

    A rank runs all its stages for one wave before it begins the next. If it has several stages, it works on a wave's
    later micro-batches while the first ones are on other ranks; and no more than a wave is in flight.
    """
    width = len(schedule.order)
    orders: list[list[Action]] = [[] for _ in schedule.order]
    for first in range(0, num_microbatches, width):
        for s in range(schedule.num_stages):
            for m in range(first, min(first + width, num_microbatches)):
                orders[schedule.rank_of(s, m)].append(Action(s, Phase.FORWARD, m))
    return Schedule(
        devices=schedule.devices, num_microbatches=num_microbatches, order=tuple(tuple(order) for order in orders)
    )


def limited_sends(order: Lowered, limit: int) -> dict[Action, tuple[Transfer, ...]]:
    """Returns, by action of a rank, the send that is to be done before it, so that at most `limit` + 1 are unfinished.

    Without backwards no action of a rank needs to come after its sends have been used. Waiting for a send never
    deadlocks, see `finished_sends`.
    """
    finished, sends = dict[Action, tuple[Transfer, ...]](), deque[Transfer]()
    for action in order:
        if not isinstance(action, Transfer):
            if len(sends) > limit:
                finished[action] = (sends.popleft(),)
        elif action.end is End.SEND:
            sends.append(action)
    return finished


@dataclass(slots=True)
class _StageTensors:
    """Tensors that are passed between stages; keys (stage, micro-batch) are those of the stage on this rank.

    Attributes:
        examples: meta tensors like those that are passed, by micro-batch size and name.
        outputs: outputs of this rank's stages, until they are sent or the next stage on this rank uses them.
        received: the buffers of receives.
    """

    parts: Split
    rows: Sequence[range]
    examples: dict[int, dict[str, Tensor]]
    device: torch.device
    outputs: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    received: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)

    def receiving(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Returns new buffers for a stage's inputs."""
        examples = (self._example(len(self.rows[microbatch]), name) for name in self.parts.stages[stage].received)
        buffers = tuple(torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in examples)
        self.received[stage, microbatch] = buffers
        return buffers

    def inputs(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Returns, and forgets, a stage's inputs from the stage before."""
        if stage == 0:
            return ()
        if (stage, microbatch) not in self.received:
            return self.outputs.pop((stage - 1, microbatch))
        return self.received.pop((stage, microbatch))

    def sent(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Returns, and forgets, a stage's outputs for the next one."""
        return self.outputs.pop((stage, microbatch))

    def _example(self, size: int, name: str) -> Tensor:
        if size not in self.examples:
            self.examples[size] = at_size(self.parts, size)
        return self.examples[size][name]
