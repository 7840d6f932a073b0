"""A model that is trained by a plan, seen from one rank: builds its stages, and runs steps and evaluations."""

import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from msgspec.structs import asdict
from torch import Tensor, nn

from bapipe.equivalence.losses import check_no_parameters
from bapipe.equivalence.outcome import Loss
from bapipe.equivalence.sample_dims import sample_dims_of_model
from bapipe.errors import BapipeError, InvalidModel
from bapipe.formats.plan import Plan, check_plan
from bapipe.module_state.modes import idle_dropout, is_evaluating
from bapipe.module_state.python_random import all_generators_restored
from bapipe.optimizers import check_clip_norm
from bapipe.runtime.batch_check import BatchSpec, GivenInput, by_name, check_same_batch
from bapipe.runtime.clock import clock_for
from bapipe.runtime.connected_stages import ConnectedStages, connect_stages
from bapipe.runtime.copy_streams import copied_ahead, copy_stream, copying_beside, wait_for_copies, wait_on_device
from bapipe.runtime.cut_model import cut_model
from bapipe.runtime.evaluation import ForwardResult
from bapipe.runtime.gather_timeline import LocalTimeline, gather_timeline
from bapipe.runtime.grad_scaler import GradScalerState, unscale
from bapipe.runtime.initial_values import warn_of_unlike_values
from bapipe.runtime.materialize import drop_others, materialize
from bapipe.runtime.optimizer import (
    OptimizerFactory,
    OptimizerState,
    StageOptimizers,
    check_optimizer_factory,
    clip_grad_norm,
    sgd,
)
from bapipe.runtime.peak_memory import PeakMemory
from bapipe.runtime.process_layout import layout_of
from bapipe.runtime.rng import PerOperatorRng
from bapipe.runtime.runnable import check_no_groups
from bapipe.runtime.same_model import check_same_model
from bapipe.runtime.settings_check import check_autocast, check_optimizers, check_settings
from bapipe.runtime.shared_buffers import SharedBuffers
from bapipe.runtime.stage_state import StageState
from bapipe.runtime.traced_values import TracedValues
from bapipe.schedules.table import Action, Schedule
from bapipe.simulator.timeline import Timeline
from bapipe.torch_device import current_device, move_tensors
from bapipe.torch_private.tensors import version
from bapipe.torch_settings import tf32
from bapipe.tracing.bound_inputs import Inputs, check_buckets, check_inputs, only_tensor_inputs, tensor_inputs
from bapipe.tracing.capture import check_has_layers
from bapipe.tracing.changing_state import changing_buffers
from bapipe.tracing.model import persistent_state, state_names, unused_state
from bapipe.tracing.stage_module import argument_names, stage_module

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingLoss:
    """The mean loss of a mini-batch; `value`, that loss times `scale`, may not have been computed yet."""

    value: Tensor
    scale: float

    def read(self) -> float:
        """Returns the loss; waits for the device."""
        return float(self.value.item()) / self.scale


class Pipeline:
    """This rank's stages of a plan, ready to train.

    Every process of a group makes one and calls its methods together with the others. Of the plan's devices that have a
    stage, process i of the group runs the i-th. A module on the meta device gets storage for this rank's layers only;
    of a module that has values, this rank keeps its own layers and drops the others. Either way the module itself is
    changed. Replicas of a stage start from the values of the first one.

    Raises:
        BapipeError: the plan is not for this model or this group, was made from a profile with other settings, or
            cannot run; its stages would not train as the module does; there is no process group; `optimizer` does not
            make optimizers; `clip_norm` is not more than 0; or `autocast` is no 16-bit type.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        loss: Loss,
        inputs: Inputs,
        optimizer: OptimizerFactory | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        initialize: Callable[[nn.Module], None] | None = None,
        buckets: Sequence[Sequence[Tensor]] = (),
        evaluates: bool = False,
        check: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Builds this rank's stages.

        Args:
            module: the module that the plan is for, with the same values in all processes, or on the meta device.
            loss: returns the mean loss of an output and a target.
            inputs: examples of the model's inputs, by position or, as a mapping, by name: tensors of any batch size, on
                any device, in the order in which `step` takes them; and constants that the forward takes.
            optimizer: returns the optimizer of the parameters that it is called with, those of one stage; by default
                SGD with a learning rate of 0.01 and a momentum of 0.9. An optimizer that looks at all parameters
                together, as for a norm or an estimated step size, sees those of one stage.
            clip_norm: the maximum norm of all gradients of the model together; None does not clip.
            autocast: the dtype of `torch.autocast` for forwards and the loss; tensors are sent in the types that it
                gives them. With float16, losses are scaled as by torch's GradScaler, and a step with gradients that are
                not finite updates nothing. None is no autocast.
            device: where this rank computes, such as `"cuda"`.
            seed: seed of initial values, and of operators that draw random numbers.
            initialize: called with each layer that is on the meta device, after its `reset_parameters()`, to set its
                parameters.
            buckets: examples of inputs of other sizes, such as shorter sentences, that whole mini-batches may have.
            evaluates: whether `evaluate` will be called, for which the module is traced a second time.
            check: whether to compare the stages of a module that has values, run as the plan says, with the module
                itself, on a few samples.
            group: the processes; None is the default group.
        """
        check_plan(plan)
        check_no_groups(plan)
        check_no_parameters(loss)
        check_clip_norm(clip_norm)
        check_autocast(autocast)
        optimizer = sgd() if optimizer is None else optimizer
        check_optimizer_factory(optimizer)
        self._plan, self._device, self._autocast = plan, current_device(device), autocast
        self._layout = layout_of(plan, self._device, group)
        check_has_layers(module)
        check_inputs(module, inputs)
        check_buckets(buckets, len(tensor_inputs(inputs)))
        if is_evaluating(module):
            _log.warning(
                "the module is in evaluation mode, and so are its stages: dropout does nothing, and running statistics "
                "do not change; call train() on it before, and then eval() on the parts that should stay in that mode"
            )
        elif (idle := idle_dropout(module)) is not None:
            _log.warning("%s", idle)
        check_settings(plan, module, self._device, autocast)
        self.stages = _in_order_of_updates(self._layout.schedule, self.rank)

        keys, names = frozenset(persistent_state(module)), state_names(module)
        with only_tensor_inputs(module, inputs) as tensors:
            cut = cut_model(
                module,
                plan,
                tensors,
                autocast=autocast,
                device=self._device,
                buckets=buckets,
                evaluates=evaluates,
                check=check,
                group=group,
            )
        self._split, self._fault_of_one = cut.trained, cut.fault_of_one
        sample_dims = sample_dims_of_model(self._split) if self.needs_target else ()  # while the module has all layers
        self._traced_values = TracedValues(self._split.model)
        self._shared_buffers = SharedBuffers(self._split, self.stages)

        check_same_model(self._split.model, loss, group)
        warn_of_unlike_values(module, group)
        # Give this rank's layers storage and values, and measure the peak of memory from when it holds nothing else.
        self._rng = PerOperatorRng(seed, self._device)
        self._modules: dict[int, nn.Module] = {
            s: stage_module(self._split, s, self._device, self._rng) for s in self.stages
        }
        # The first stage also holds parameters and buffers that no layer uses, so that checkpoints have all of them.
        unused = tuple(unused_state(self._split.model).values()) if 0 in self.stages else ()
        self._state = StageState(
            modules=self._modules,
            unused=unused,
            names=names,
            keys=keys,
            non_persistent=changing_buffers(self._split.model) - keys,
        )
        drop_others(self._split, self._state.tensors())
        self._peak_memory = PeakMemory(self._device, self._state.tensors())
        materialize(self._split, self._state.tensors(), self._device, seed, initialize)
        if self.needs_target:
            move_tensors(loss, self._device)  # such as class weights

        self._clock = clock_for(self._device)
        sized = [self._split, *cut.of_buckets]
        self._connection: ConnectedStages | None = connect_stages(
            plan,
            self._layout,
            sized=sized,
            evaluated=cut.evaluated,
            modules=self._modules,
            loss=loss,
            sample_dims=sample_dims,
            autocast=autocast,
            clock=self._clock,
            rng=self._rng,
        )
        self._size = 0  # the index of the executor that ran the last step

        self._optimizers = StageOptimizers(self._modules, optimizer, self._clock, self._layout)
        check_optimizers(plan, self._optimizers.optimizers)
        self._clip_norm = clip_norm
        self._expected = [
            BatchSpec(
                needed=self.needs,
                examples=parts.examples,
                minibatch_size=plan.minibatch_size,
                device=self._device,
                settings=plan.compute_settings,
            )
            for parts in sized
        ]
        self.grad_scaler = GradScalerState() if autocast is torch.float16 else None
        self._start: object | None = None
        self._copy_stream = copy_stream(self._device)
        self._kept_until: object | None = None
        self._written_by_forwards = frozenset[str]()  # names of parameters
        self._num_evaluated = 0  # micro-batches since the last step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error other ranks may wait in a step for this one: neither can they come here, nor groups be
        # destroyed in which they wait.
        if kind is None:
            self.close()

    def close(self) -> None:
        """Closes the connections and threads of this pipeline; all ranks call it together, later calls do nothing.

        A pipeline is closed at the end of a `with` block, unless that ends with an error. The process group that it was
        made in stays, and so do weights and the state of optimizers, which can still be read; no step or evaluation can
        be run any more, and the last one's timeline is gone.
        """
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            del connection
            gc.collect()  # a group ends when nothing refers to it, and torch's stages are in reference cycles

    @property
    def rank(self) -> int:
        """The schedule's rank that this process runs."""
        return self._layout.rank

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The modules of this rank's stages, by stage."""
        return self._modules

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the model's inputs that this rank loads."""
        loaded = {name for s in self.stages for name in self._split.stages[s].loaded}
        return tuple(name for name in self._split.model.inputs if name in loaded)

    @property
    def needs_target(self) -> bool:
        """Whether this rank computes the loss."""
        return len(self._plan.stages) - 1 in self.stages

    @property
    def microbatch_size(self) -> int:
        """The number of samples in a micro-batch."""
        return self._plan.microbatch_size

    @property
    def microbatches(self) -> tuple[int, ...]:
        """The micro-batches that this rank runs; of the tensors that it loads, only samples of these are used."""
        return tuple(sorted({action.microbatch for action in self._layout.schedule.order[self.rank]}))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs that are tensors, in the order in which `step` takes them."""
        return self._split.model.inputs

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of the last step on this rank, in the order in which they ran."""
        return self._connected.executors[self._size].order

    def step(self, *inputs: GivenInput, target: Tensor | None = None, bucket: int | None = None) -> float | None:
        """Trains on one mini-batch; returns its mean loss on the last stage's ranks, None elsewhere.

        This waits until the device has computed the loss; `start_step` does not. When this returns, the tensors that it
        was given may be overwritten.

        Inputs are given in the order of `input_names`, or as one mapping by these names. Every rank is given the same
        mini-batch, which the first step checks. What this rank does not load (see `needs`, `needs_target`) may be None,
        and trailing inputs or names left out. `bucket` is the index in `buckets` of the samples' sizes, the same on
        every rank; None if they have the sizes of `inputs`, the examples.

        Raises:
            BapipeError: a tensor that this rank needs is missing, or not of the plan's mini-batch size and the
                example's shape and type; ranks were given different ones; there is no such bucket; a parameter requires
                gradients that was frozen when this was made; or it is called inside `torch.autocast`.
            LayerFailed: the code of a layer, or its backward, raised an error.
        """
        if self._start is None:
            named = by_name(inputs, self.input_names) | {"the target": target}
            given = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor) and tensor.dim() > 0}
            check_same_batch(given, self._layout.group)
        loss = self.start_step(*inputs, target=target, bucket=bucket)
        if loss is None:
            wait_for_copies(self._copy_stream)  # not needed where the loss is read, which was computed after them
            return None
        return loss.read()

    def start_step(
        self, *inputs: GivenInput, target: Tensor | None = None, bucket: int | None = None
    ) -> PendingLoss | None:
        """Runs a step as `step` does, without waiting for the device; returns the loss, to be read later, or None.

        A GPU may still be copying the given tensors from page-locked memory: they must not be changed until this rank's
        GPU has done the step.
        """
        connected = self._connected
        self._enter_any_autocast()
        num_buckets = len(connected.executors) - 1
        if bucket is not None and not 0 <= bucket < num_buckets:
            raise BapipeError(
                f"`bucket` is {bucket}: this pipeline was made with {num_buckets} `buckets`, numbered from 0; None is "
                "for inputs of the planned size"
            )
        self._optimizers.check_frozen()
        self._traced_values.warn_of_changes()
        self._size = 0 if bucket is None else bucket + 1  # the first is for inputs of the planned size
        executor, expected = connected.executors[self._size], self._expected[self._size]
        given = by_name(inputs, self.input_names)
        with copying_beside(self._device, self._copy_stream, (*given.values(), target)) as copied:
            loaded = expected.load(given, self._plan.minibatch_size)
            if self.needs_target:
                target = expected.checked("target", target, None, self._plan.minibatch_size)
            copied += [*loaded.values(), *([target] if self.needs_target and target is not None else [])]
        self._clock.restart()
        self._start = self._clock.stamp()
        self._optimizers.zero_grad()
        self._shared_buffers.begin()
        for replicas in connected.replicas.values():
            replicas.begin()
        scale = executor.loss_scale = self.grad_scaler.scale if self.grad_scaler is not None else 1.0
        # `_rng` seeds the global generators before every random operator: this must have no effect outside of the step.
        allowed, writes = self._plan.compute_settings.tf32, self._versions()
        with tf32(allowed), all_generators_restored(self._device):
            loss = executor.run(*self._stage_inputs(loaded), target if self.needs_target else None)
        self._written_by_forwards |= {name for name, count in self._versions().items() if count != writes[name]}
        self._shared_buffers.finish()
        self._rng.step += 1
        self._num_evaluated = 0
        self._update(connected)
        if loss is None:
            return None
        last = connected.replicas.get(len(self._plan.stages) - 1)
        return PendingLoss(loss if last is None else last.total(loss), scale)

    def copied_ahead(
        self, inputs: Sequence[Tensor | None], target: Tensor | None
    ) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
        """Starts to copy a mini-batch to the device, overlapping its work; returns copies for the next `start_step`."""
        *copies, own_target = (copied_ahead(x, self._device, self._copy_stream) for x in (*inputs, target))
        return tuple(copies), own_target

    def _stage_inputs(self, loaded: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Returns the inputs of the first stage by position, and those that later stages load by argument name."""
        first = self._split.stages[0].loaded if 0 in self.stages else ()
        later = tuple(dict.fromkeys(name for s in self.stages if s > 0 for name in self._split.stages[s].loaded))
        arguments = argument_names(self._split, later)
        return [loaded[name] for name in first], {
            argument: loaded[name] for argument, name in zip(arguments, later, strict=True)
        }

    def _update(self, connected: ConnectedStages) -> None:
        """Completes the gradients and updates the parameters, in the order in which stages' gradients became final."""
        connected.tied.sum()
        wait_on_device(self._device, self._kept_until)
        self._kept_until = None
        # In the same order on all ranks, and all before the first wait: two stages may have the same replicas, on which
        # their gradients may become final in different orders.
        for replicas in connected.replicas.values():
            replicas.gradients.start()
        finite = self._unscale()
        if self._clip_norm is not None and finite:
            self._clip(self._clip_norm)
        for stage in self.stages if finite else ():
            if stage in connected.replicas:  # waits for this stage's all-reduces only: those of later stages may run
                connected.replicas[stage].gradients.finish()
            self._optimizers.step(stage)
        for replicas in connected.replicas.values():
            replicas.finish()

    def evaluate(
        self,
        *inputs: GivenInput,
        target: Tensor | None = None,
        num_samples: int | None = None,
        keep: Callable[[Any], Any] = lambda output: output,
    ) -> ForwardResult | None:
        """Passes a mini-batch, given as to `step`, through the model in evaluation mode; all ranks call it together.

        `num_samples` is the number of samples, the same on every rank, by default the plan's mini-batch. Without a
        target no loss is computed. `keep` gets the model's output of each micro-batch and returns what to keep of it.
        What the model draws depends on the seed, the step and the micro-batches evaluated since that, not on the plan.
        Returns the result on ranks of the last stage, None on others. Parameters, buffers, attributes, random
        generators and the training mode stay as they are; a loss that is a module is in evaluation mode, too, and keeps
        its state.

        Raises:
            BapipeError: a tensor that this rank needs is missing or does not fit; or it is called inside
                `torch.autocast`.
            InvalidModel: the model does not run on a micro-batch of the last one's size; or the last one is a single
                sample, for which the stages do not give what the module does; or evaluation changes a parameter.
        """
        executor = self._connected.evaluation
        if executor is None:
            raise BapipeError("this pipeline was not made to evaluate: Pipeline(..., evaluates=True)")
        self._enter_any_autocast()
        num = self._plan.minibatch_size if num_samples is None else num_samples
        if not 1 <= num <= self._plan.minibatch_size:
            raise BapipeError(
                f"{num} samples to evaluate: want 1 to {self._plan.minibatch_size}, the plan's mini-batch"
            )
        if num % self._plan.microbatch_size == 1 and self._fault_of_one is not None:
            raise InvalidModel(
                f"of {num} samples the last micro-batch is a single one, for which the stages would not give what the "
                f"module does: {self._fault_of_one}; evaluate another number of samples"
            )
        expected = self._expected[0]
        loaded = expected.load(by_name(inputs, self.input_names), num)
        target = expected.checked("target", target, None, num) if self.needs_target and target is not None else None
        with tf32(self._plan.compute_settings.tf32):
            num_before, self._num_evaluated = self._num_evaluated, self._num_evaluated + -(-num // self.microbatch_size)
            return executor.run(loaded, target, num, keep, self._rng.step, num_before)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's parameters and buffers by name in the original module; tied ones by all of their names.

        Together the state dicts of all ranks are that of the module, without extra state (`get_extra_state`): the first
        stage's has what no layer uses.
        """
        return self._state.state_dict()

    def non_persistent_buffers(self) -> dict[str, Tensor]:
        """Returns this rank's buffers that training may change and that `state_dict` leaves out, by name.

        To continue a run exactly, save these, too, and copy the saved values into them.
        """
        return self._state.non_persistent_buffers()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that this rank's stages use, with their gradients, by their names in the module."""
        return self._state.named_parameters()

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of the following steps.

        Raises:
            BapipeError: it is negative or not finite; or this rank's groups of parameters have different ones.
        """
        if not 0 <= value < math.inf:
            raise BapipeError(f"a learning rate of {value}: want a finite one of at least 0")
        self._optimizers.set_learning_rate(value)

    def start_at(self, step: int) -> None:
        """Makes the next step draw the random numbers that step `step`, counted from 0, of an uninterrupted run draws.

        Raises:
            BapipeError: `step` is not an integer, or negative.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise BapipeError(f"`step` is {step!r}: want a whole number of at least 0")
        self._rng.step, self._num_evaluated = step, 0

    def counted_parameters(self) -> tuple[nn.Parameter, ...]:
        """Returns parameters for sums over all ranks: each of the model is counted by one of the ranks that have it."""
        return self._state.counted_parameters(self._layout, self._split)

    def optimizer_state(self) -> OptimizerState:
        """Returns the state of this rank's optimizers, by `name of the parameter:key`, and of loss scaling in float16.

        It consists of dictionaries, tensors and numbers, which `torch.load` reads. Its tensors are the optimizers' own:
        the next step changes them.
        """
        state = self._optimizers.state(self.named_parameters())
        if self.grad_scaler is not None:
            state["grad_scaler"] = asdict(self.grad_scaler)
        return state

    def _versions(self) -> dict[str, int]:
        """Returns torch's counts of writes to the parameters of this rank, by name."""
        return {name: version(parameter) for name, parameter in self.named_parameters().items()}

    def changed_by_forwards(self) -> frozenset[str]:
        """Returns the names in `state_dict` of tensors that a forward may change.

        These are all buffers and frozen parameters, and the trained parameters that forwards have written to so far,
        such as embeddings with `max_norm`.
        """
        unchanged = {
            parameter.data_ptr()
            for name, parameter in self.named_parameters().items()
            if parameter.requires_grad and name not in self._written_by_forwards
        }
        return frozenset(name for name, tensor in self.state_dict().items() if tensor.data_ptr() not in unchanged)

    def keep_state_until(self, copied: object | None) -> None:
        """Makes the next update wait, on the device, for the event `copied`, after which the state has been copied."""
        self._kept_until = copied

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Restores what `optimizer_state` returned, on this rank or on all ranks together, possibly under another plan.

        Raises:
            BapipeError: it is the state of another optimizer, lacks parameters of this rank, or is no such state.
        """
        self._optimizers.load_state(state, self.named_parameters())
        if self.grad_scaler is not None and "grad_scaler" in state:
            self.grad_scaler = GradScalerState(**state["grad_scaler"])

    def busy_ns(self) -> int:
        """Returns how long this rank computed in the last step; the rest of the step it waited."""
        return self._optimizers.busy_ns() + sum(end - start for _, start, end in self._spans())

    def peak_bytes(self) -> int | None:
        """Returns the peak memory that this rank's stages have used so far; None if it is not known."""
        return self._peak_memory.peak_bytes()

    def timeline(self) -> Timeline:
        """Returns the measured timeline of the last step; every rank calls it together, and all get the same.

        Its memory counts parameters, gradients and optimizer state, not what lives only within the step.
        """
        connected = self._connected
        if self._start is None:
            raise BapipeError("no step has run, so there is no timeline")
        local = LocalTimeline(
            start=self._start,
            spans=self._spans(),
            updates=self._optimizers.updates,
            syncs=[(s, *sync) for s, replicas in connected.replicas.items() for sync in replicas.gradients.syncs()],
            memory=self._state.memory(self._optimizers.state_bytes()),
        )
        names = [device.name for device in self._plan.cluster.devices]
        return gather_timeline(self._layout, local, self._clock, names)

    @property
    def _connected(self) -> ConnectedStages:
        """What runs the stages.

        Raises:
            BapipeError: this pipeline is closed.
        """
        if self._connection is None:
            raise BapipeError(
                "this pipeline is closed, as one is at the end of its `with` block or after `close()`: run steps and "
                "evaluations, and read what the last step did, before that; its weights can still be read"
            )
        return self._connection

    def _spans(self) -> tuple[tuple[Action, int, int], ...]:
        return self._connected.executors[self._size].spans()

    def _enter_any_autocast(self) -> None:
        """Drops the casts of parameters that an autocast around this call keeps, also over updates until it ends.

        Raises:
            BapipeError: there is one, and stages that were cut without would compute otherwise in it.
        """
        torch.clear_autocast_cache()
        if self._autocast is None and torch.is_autocast_enabled(self._device.type):
            raise BapipeError(
                "torch.autocast is on around this call, but the Pipeline was made without it: make it with `autocast`, "
                "and a plan from a profile that was measured so (`Settings(autocast=...)`), or leave the context"
            )

    def _unscale(self) -> bool:
        """Divides gradients by the loss scale, if losses are scaled; returns whether parameters are to be updated."""
        if self.grad_scaler is None:
            return True
        finite = unscale(self._gradients(), self.grad_scaler.scale, self._device, self._layout.group)
        self.grad_scaler = self.grad_scaler.after_step(finite)
        return finite

    def _clip(self, max_norm: float) -> None:
        gradients = self._gradients()
        counted = [p.grad for p in self.counted_parameters() if p.grad is not None]
        clip_grad_norm(gradients, counted, max_norm, self._device, self._layout.group)

    def _gradients(self) -> list[Tensor]:
        """Returns this rank's gradients, after waiting for the sums over replicas."""
        for replicas in self._connected.replicas.values():
            replicas.gradients.finish()
        return [p.grad for p in self._state.parameters() if p.grad is not None]


def _in_order_of_updates(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Returns a rank's stages in the order in which their gradients become final; stages without actions come last."""
    last = {action.stage: i for i, action in enumerate(schedule.order[rank])}  # index of a stage's last action
    stages = [s for s, ranks in enumerate(schedule.devices) if rank in ranks]
    return tuple(sorted(stages, key=lambda s: (s not in last, last.get(s, 0), s)))
