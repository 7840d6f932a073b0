"""The training steps of a rank: the actions of its stages on a mini-batch, and then the update."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.module_state.python_random import all_generators_restored
from bapipe.runtime.clock import Clock
from bapipe.runtime.connected_stages import ConnectedStages
from bapipe.runtime.copy_streams import copying_beside
from bapipe.runtime.gather_timeline import LocalTimeline, gather_timeline
from bapipe.runtime.grad_scaler import GradScalerState
from bapipe.runtime.optimizer import StageOptimizers
from bapipe.runtime.rank_stages import RankStages
from bapipe.runtime.update import update
from bapipe.schedules.table import Action
from bapipe.simulator.timeline import Timeline
from bapipe.torch_private.tensors import version
from bapipe.torch_settings import tf32


@dataclass(frozen=True, slots=True)
class PendingLoss:
    """The mean loss of a mini-batch; `value`, that loss times `scale`, may not have been computed yet."""

    value: Tensor
    scale: float

    def read(self) -> float:
        """Returns the loss; waits for the device."""
        return float(self.value.item()) / self.scale


class TrainingSteps:
    """Runs the steps of a rank one after another, and holds what of one step the next one or a report needs.

    Attributes:
        grad_scaler: loss scaling of the next step; None if losses are not scaled.
        kept_until: an event of the device before which the next update does not begin; None if there is none.
        written_by_forwards: the names of the parameters that forwards have written to.
    """

    def __init__(
        self,
        own: RankStages,
        optimizers: StageOptimizers,
        clock: Clock,
        copy_stream: torch.cuda.Stream | None,
        *,
        clip_norm: float | None,
        grad_scaler: GradScalerState | None,
    ) -> None:
        """`copy_stream` is where mini-batches are copied to the device; None on a CPU."""
        self._own, self._optimizers, self._clock, self._copy_stream = own, optimizers, clock, copy_stream
        self._clip_norm = clip_norm
        self._expected = [own.batch_spec(parts) for parts in own.sized]
        self._start: object | None = None
        self._size = 0  # the index of the executor that ran the last step
        self.grad_scaler = grad_scaler
        self.kept_until: object | None = None
        self.written_by_forwards = frozenset[str]()

    @property
    def have_run(self) -> bool:
        """Whether a step has begun."""
        return self._start is not None

    def start(
        self, connected: ConnectedStages, given: Mapping[str, Tensor | None], target: Tensor | None, bucket: int | None
    ) -> PendingLoss | None:
        """Runs a step as `Pipeline.start_step` says; `given` are the model's inputs by name."""
        own, plan = self._own, self._own.plan
        num_buckets = len(connected.executors) - 1
        if bucket is not None and not 0 <= bucket < num_buckets:
            raise BapipeError(
                f"`bucket` is {bucket}: this pipeline was made with {num_buckets} `buckets`, numbered from 0; None is "
                "for inputs of the planned size"
            )
        self._optimizers.check_frozen()
        own.traced_values.warn_of_changes()
        self._size = 0 if bucket is None else bucket + 1  # the first is for inputs of the planned size
        executor, expected = connected.executors[self._size], self._expected[self._size]
        with copying_beside(own.layout.device, self._copy_stream, (*given.values(), target)) as copied:
            loaded = expected.load(given, plan.minibatch_size)
            target = expected.checked("target", target, None, plan.minibatch_size) if own.needs_target else None
            copied += [*loaded.values(), *([] if target is None else [target])]
        self._clock.restart()
        self._start = self._clock.stamp()
        self._optimizers.zero_grad()
        own.shared_buffers.begin()
        for replicas in connected.replicas.values():
            replicas.begin()
        scale = executor.loss_scale = 1.0 if self.grad_scaler is None else self.grad_scaler.scale
        writes = self._num_writes()
        # `rng` seeds the global generators before every random operator: this must have no effect outside of the step.
        with tf32(plan.compute_settings.tf32), all_generators_restored(own.layout.device):
            loss = executor.run(*own.arguments(loaded), target)
        self.written_by_forwards |= {name for name, num in self._num_writes().items() if num != writes[name]}
        own.shared_buffers.finish()
        own.rng.step += 1
        kept_until, self.kept_until = self.kept_until, None
        self.grad_scaler = update(
            own,
            connected,
            self._optimizers,
            clip_norm=self._clip_norm,
            grad_scaler=self.grad_scaler,
            kept_until=kept_until,
        )
        if loss is None:
            return None
        last = connected.replicas.get(len(plan.stages) - 1)
        return PendingLoss(loss if last is None else last.total(loss), scale)

    def _num_writes(self) -> dict[str, int]:
        """Returns torch's counts of writes to the parameters of this rank, by name."""
        return {name: version(parameter) for name, parameter in self._own.state.named_parameters().items()}

    def order(self, connected: ConnectedStages) -> tuple[Action, ...]:
        """Returns the actions of the last step, in the order in which they ran."""
        return connected.executors[self._size].order

    def busy_ns(self, connected: ConnectedStages) -> int:
        """Returns how long this rank computed in the last step."""
        spans = connected.executors[self._size].spans()
        return self._optimizers.busy_ns() + sum(end - start for _, start, end in spans)

    def timeline(self, connected: ConnectedStages) -> Timeline:
        """Returns the measured timeline of the last step; all ranks call it together, and get the same."""
        if self._start is None:
            raise BapipeError("no step has run, so there is no timeline")
        local = LocalTimeline(
            start=self._start,
            spans=connected.executors[self._size].spans(),
            updates=self._optimizers.updates,
            syncs=[(s, *sync) for s, replicas in connected.replicas.items() for sync in replicas.gradients.syncs()],
            memory=self._own.state.memory(self._optimizers.state_bytes()),
        )
        names = [device.name for device in self._own.plan.cluster.devices]
        return gather_timeline(self._own.layout, local, self._clock, names)
