"""A model that is trained by a plan, seen from one rank: builds its stages, and runs steps and evaluations."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import asdict
from torch import Tensor, nn

from bapipe.equivalence.losses import check_no_parameters
from bapipe.equivalence.outcome import Loss
from bapipe.errors import BapipeError, InvalidModel
from bapipe.formats.plan import Plan, check_plan
from bapipe.optimizers import check_clip_norm
from bapipe.runtime.autocast import enter_any_autocast
from bapipe.runtime.batch_check import GivenInput, by_name, check_same_batch
from bapipe.runtime.call_order import CallOrder
from bapipe.runtime.clock import clock_for
from bapipe.runtime.connected_stages import ConnectedStages, connect_stages
from bapipe.runtime.copy_streams import copied_ahead, copy_stream, copying_beside, wait_for_copies
from bapipe.runtime.evaluation import ForwardResult
from bapipe.runtime.grad_scaler import GradScalerState
from bapipe.runtime.optimizer import OptimizerFactory, StageOptimizers, check_optimizer_factory, sgd
from bapipe.runtime.optimizer_state import OptimizerState, joined
from bapipe.runtime.process_groups import OwnGroups
from bapipe.runtime.rank_stages import make_rank_stages
from bapipe.runtime.runnable import check_no_groups
from bapipe.runtime.settings_check import check_autocast, check_optimizers
from bapipe.runtime.told_errors import ToldErrors
from bapipe.runtime.training_steps import PendingLoss, TrainingSteps
from bapipe.schedules.table import Action
from bapipe.simulator.timeline import Timeline
from bapipe.torch_device import current_device
from bapipe.torch_settings import tf32
from bapipe.tracing.bound_inputs import Inputs

Arguments = ParamSpec("Arguments")

Result = TypeVar("Result")


def _together(
    what: Callable[["Pipeline", Mapping[str, Any]], str],
) -> Callable[
    [Callable[Concatenate["Pipeline", Arguments], Result]], Callable[Concatenate["Pipeline", Arguments], Result]
]:
    """Returns a decorator of methods that all processes call together, of whose errors they tell one another.

    `what` returns what is called, from the pipeline and the arguments that are given by name.
    """

    def decorator(
        call: Callable[Concatenate["Pipeline", Arguments], Result],
    ) -> Callable[Concatenate["Pipeline", Arguments], Result]:
        @wraps(call)
        def calling(self: "Pipeline", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with self._errors.told(what(self, kwargs)):
                return call(self, *args, **kwargs)

        return calling

    return decorator


def _stepping(_: "Pipeline", given: Mapping[str, Any]) -> str:
    bucket = given.get("bucket")
    return "`step`" if bucket is None else f"`step` with bucket {bucket}"


def _evaluating(pipeline: "Pipeline", given: Mapping[str, Any]) -> str:
    num_samples = given.get("num_samples")
    return f"`evaluate` of {pipeline._plan.minibatch_size if num_samples is None else num_samples} samples"


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
        self._own = own = make_rank_stages(
            module,
            plan,
            loss=loss,
            inputs=inputs,
            autocast=autocast,
            device=self._device,
            seed=seed,
            initialize=initialize,
            buckets=buckets,
            evaluates=evaluates,
            check=check,
            group=group,
        )
        self.stages = tuple(own.modules)
        self._clock, self._copy_stream = clock_for(self._device), copy_stream(self._device)
        self._connection: ConnectedStages | None
        self._groups = groups = OwnGroups(own.layout)
        calls = CallOrder()
        with groups.aborted_on_error():
            self._connection = connect_stages(own, groups, loss, autocast, self._clock, calls)
            self._optimizers = StageOptimizers(own.modules, optimizer, self._clock, own.layout)
            check_optimizers(plan, self._optimizers.optimizers)
            self._errors = ToldErrors(own.layout, lambda: groups.made, calls)
        self._steps = TrainingSteps(
            own,
            self._optimizers,
            self._clock,
            self._copy_stream,
            clip_norm=clip_norm,
            grad_scaler=GradScalerState() if autocast is torch.float16 else None,
        )
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
        if self._connection is not None:
            self._connection = None
            self._errors.close()
            self._groups.destroy()
            gc.collect()  # a group ends when nothing refers to it, and torch's stages are in reference cycles

    @property
    def rank(self) -> int:
        """The schedule's rank that this process runs."""
        return self._own.layout.rank

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The modules of this rank's stages, by stage."""
        return self._own.modules

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the model's inputs that this rank loads."""
        return self._own.needs

    @property
    def needs_target(self) -> bool:
        """Whether this rank computes the loss."""
        return self._own.needs_target

    @property
    def microbatch_size(self) -> int:
        """The number of samples in a micro-batch."""
        return self._plan.microbatch_size

    @property
    def microbatches(self) -> tuple[int, ...]:
        """The micro-batches that this rank runs; of the tensors that it loads, only samples of these are used."""
        return tuple(sorted({action.microbatch for action in self._own.layout.schedule.order[self.rank]}))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs that are tensors, in the order in which `step` takes them."""
        return self._own.cut.trained.model.inputs

    @property
    def grad_scaler(self) -> GradScalerState | None:
        """Loss scaling of the next step; None without float16."""
        return self._steps.grad_scaler

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of the last step on this rank, in the order in which they ran."""
        return self._steps.order(self._connected)

    @_together(_stepping)
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
                gradients that was frozen when this was made; it is called inside `torch.autocast`; or an earlier call
                has failed while several processes ran it.
            LayerFailed: the code of a layer, or its backward, raised an error.
            RunFailed: another process has failed, and is named with its reason; or has called something else; or has
                ended or hangs, or the link to it is cut.
        """
        if not self._steps.have_run:
            named = by_name(inputs, self.input_names) | {"the target": target}
            given = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor) and tensor.dim() > 0}
            check_same_batch(given, self._own.layout.group)
        loss = self.start_step(*inputs, target=target, bucket=bucket)
        if loss is None:
            wait_for_copies(self._copy_stream)  # not needed where the loss is read, which was computed after them
            return None
        return loss.read()

    @_together(_stepping)
    def start_step(
        self, *inputs: GivenInput, target: Tensor | None = None, bucket: int | None = None
    ) -> PendingLoss | None:
        """Runs a step as `step` does, without waiting for the device; returns the loss, to be read later, or None.

        A GPU may still be copying the given tensors from page-locked memory: they must not be changed until this rank's
        GPU has done the step.
        """
        connected = self._connected
        enter_any_autocast(self._device, self._autocast)
        loss = self._steps.start(connected, by_name(inputs, self.input_names), target, bucket)
        self._num_evaluated = 0
        return loss

    def copied_ahead(
        self, inputs: Sequence[Tensor | None], target: Tensor | None
    ) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
        """Starts to copy a mini-batch to the device, overlapping its work; returns copies for the next `start_step`."""
        *copies, own_target = (copied_ahead(x, self._device, self._copy_stream) for x in (*inputs, target))
        return tuple(copies), own_target

    @_together(_evaluating)
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
        enter_any_autocast(self._device, self._autocast)
        num = self._plan.minibatch_size if num_samples is None else num_samples
        if not 1 <= num <= self._plan.minibatch_size:
            raise BapipeError(
                f"{num} samples to evaluate: want 1 to {self._plan.minibatch_size}, the plan's mini-batch"
            )
        fault_of_one = self._own.cut.fault_of_one
        if num % self._plan.microbatch_size == 1 and fault_of_one is not None:
            raise InvalidModel(
                f"of {num} samples the last micro-batch is a single one, for which the stages would not give what the "
                f"module does: {fault_of_one}; evaluate another number of samples"
            )
        expected, given = self._own.batch_spec(self._own.cut.trained), by_name(inputs, self.input_names)
        with copying_beside(self._device, self._copy_stream, (*given.values(), target)) as copied:
            loaded = expected.load(given, num)
            target = expected.checked("target", target, None, num) if self.needs_target and target is not None else None
            copied += [*loaded.values(), *([] if target is None else [target])]
        with tf32(self._plan.compute_settings.tf32):
            num_before, self._num_evaluated = self._num_evaluated, self._num_evaluated + -(-num // self.microbatch_size)
            result = executor.run(loaded, target, num, keep, self._own.rng.step, num_before)
        wait_for_copies(self._copy_stream)  # of what was given, which may be overwritten when this returns
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's parameters and buffers by name in the original module; tied ones by all of their names.

        Together the state dicts of all ranks are that of the module, without extra state (`get_extra_state`): the first
        stage's has what no layer uses.
        """
        return self._own.state.state_dict()

    def non_persistent_buffers(self) -> dict[str, Tensor]:
        """Returns this rank's buffers that training may change and that `state_dict` leaves out, by name.

        To continue a run exactly, save these, too, and copy the saved values into them.
        """
        return self._own.state.non_persistent_buffers()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that this rank's stages use, with their gradients, by their names in the module."""
        return self._own.state.named_parameters()

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
        self._own.rng.step, self._num_evaluated = step, 0

    def counted_parameters(self) -> tuple[nn.Parameter, ...]:
        """Returns parameters for sums over all ranks: each of the model is counted by one of the ranks that have it."""
        return self._own.state.counted_parameters(self._own.layout, self._own.cut.trained)

    def optimizer_state(self) -> OptimizerState:
        """Returns the state of this rank's optimizers, by `name of the parameter:key`, and of loss scaling in float16.

        It consists of dictionaries, tensors and numbers, which `torch.load` reads. Its tensors are the optimizers' own:
        the next step changes them.
        """
        state = self._optimizers.state(self.named_parameters())
        if self.grad_scaler is not None:
            state["grad_scaler"] = asdict(self.grad_scaler)
        return state

    def changed_by_forwards(self) -> frozenset[str]:
        """Returns the names in `state_dict` of tensors that a forward may change.

        These are all buffers and frozen parameters, and the trained parameters that forwards have written to so far,
        such as embeddings with `max_norm`.
        """
        unchanged = {
            parameter.data_ptr()
            for name, parameter in self.named_parameters().items()
            if parameter.requires_grad and name not in self._steps.written_by_forwards
        }
        return frozenset(name for name, tensor in self.state_dict().items() if tensor.data_ptr() not in unchanged)

    def keep_state_until(self, copied: object | None) -> None:
        """Makes the next update wait, on the device, for the event `copied`, after which the state has been copied."""
        self._steps.kept_until = copied

    def load_optimizer_state(self, *states: OptimizerState) -> None:
        """Restores what `optimizer_state` returned: on this rank, or under another plan what it returned on each one.

        Raises:
            BapipeError: it is the state of another optimizer, lacks parameters of this rank, or is no such state.
        """
        state = joined(states)
        self._optimizers.load_state(state, self.named_parameters())
        if self.grad_scaler is not None and "grad_scaler" in state:
            self._steps.grad_scaler = GradScalerState(**state["grad_scaler"])

    def busy_ns(self) -> int:
        """Returns how long this rank computed in the last step; the rest of the step it waited."""
        return self._steps.busy_ns(self._connected)

    def peak_bytes(self) -> int | None:
        """Returns the peak memory that this rank's stages have used so far; None if it is not known."""
        return self._own.peak_memory.peak_bytes()

    def timeline(self) -> Timeline:
        """Returns the measured timeline of the last step; every rank calls it together, and all get the same.

        Its memory counts parameters, gradients and optimizer state, not what lives only within the step.
        """
        return self._steps.timeline(self._connected)

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
