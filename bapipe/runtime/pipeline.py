"""A model trained as a plan says, seen from one rank."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from bapipe.cost import Stage, StageCost
from bapipe.errors import BapipeError
from bapipe.plan import Memory, Plan
from bapipe.runtime.clock import clock_for, clock_offset_ns
from bapipe.runtime.footprint import Footprint
from bapipe.runtime.lower import LocalStage, Loss, Runner
from bapipe.runtime.materialize import materialize
from bapipe.runtime.split import Split, argument_names, split, stage_module
from bapipe.schedule import Action
from bapipe.simulate import judge
from bapipe.timeline import Span, Timeline, Update
from bapipe.trace import trace

_NO_MEMORY = Memory(params=0, gradients=0, optimizer=0, stash=0, workspace=0, buffers=0)

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(lr: float = 0.01, momentum: float = 0.9) -> MakeOptimizer:
    """Returns a maker of SGD optimizers."""
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum)


class Pipeline:
    """This rank's stages of a plan, ready to train.

    To be made, and stepped, by every process of a group together; process i of the group plays the i-th device of the
    plan that has a stage. A module on the meta device gets real storage for this rank's layers only; of one that has
    values, this rank keeps its own layers and drops the rest. Either way the module itself is changed.

    Raises:
        BapipeError: the plan is not for this model or this group, or needs what is not executed yet.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        loss: Loss,
        inputs: Sequence[Tensor],
        optimizer: MakeOptimizer | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        initialize: Callable[[nn.Module], None] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`inputs` are examples of the model's inputs, of any batch size, on any device.

        `optimizer` makes one for the parameters of a stage, by default `sgd()`. `initialize` sets the parameters of
        one layer that is on the meta device, after its own `reset_parameters()`.
        """
        self._ranks = check_runnable(plan)
        self._plan, self._group, self._device = plan, group, torch.device(device)
        if dist.get_world_size(group) != len(self._ranks):
            raise BapipeError(
                f"the plan runs on {len(self._ranks)} devices but this group has {dist.get_world_size(group)} "
                f"processes: start {len(self._ranks)}, or plan for {dist.get_world_size(group)} devices"
            )
        self.rank = self._ranks[dist.get_rank(group)]
        schedule = plan.table
        self.stages = tuple(s for s, ranks in enumerate(schedule.devices) if self.rank in ranks)
        keys = frozenset(module.state_dict())
        self._split = split(trace(module, len(inputs)), plan, inputs)
        self._footprint = Footprint(self._device)
        materialize(self._split, self.stages, self._device, seed, initialize)
        local = [_local_stage(self._split, s) for s in self.stages]
        self._modules = {stage.index: stage.module for stage in local}
        self._keys = keys
        self._clock = clock_for(self._device)
        self._runner = Runner(schedule, self._ranks, local, self._loss(loss), self._clock, self._device, group)
        self._optimizers = _optimizers(self._modules, optimizer or sgd())
        self._updates: list[tuple[int, object, object]] = []
        self._start: object | None = None

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
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs, in the order in which `step` takes them."""
        return self._split.model.inputs

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of the last step on this rank, in the order in which they ran."""
        return self._runner.order

    def step(self, *inputs: Tensor | None, target: Tensor | None = None) -> float | None:
        """Trains on one mini-batch; returns its mean loss on the last stage's rank, None elsewhere.

        What this rank does not load (see `needs`, `needs_target`) may be None, and trailing inputs left out.

        Raises:
            BapipeError: a tensor that this rank needs is missing, or not of the plan's mini-batch size and the
                example's shape and type.
        """
        loaded = self._load(inputs)
        if self.needs_target:
            target = self._checked("target", target, None)
        first = self._split.stages[0].loaded if 0 in self.stages else ()
        later = dict.fromkeys(name for s in self.stages if s > 0 for name in self._split.stages[s].loaded)
        names = argument_names(self._split, tuple(later))
        self._start = self._clock.stamp()
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)  # zeroing costs a pass to fill and one more to add
        loss = self._runner.run(
            [loaded[name] for name in first],
            {argument: loaded[name] for argument, name in zip(names, later, strict=True)},
            target if self.needs_target else None,
        )
        self._updates = [self._update(stage) for stage in self.stages]
        return None if loss is None else float(loss.item())

    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's parameters and buffers by their names in the original module."""
        state = (pair for module in self._modules.values() for pair in module.state_dict().items())
        return {name: tensor for name, tensor in state if name in self._keys}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns this rank's parameters, with their gradients, by their names in the original module."""
        return {name: value for module in self._modules.values() for name, value in module.named_parameters()}

    def peak_bytes(self) -> int | None:
        """Returns what this rank's stages have taken of the device at most, None where it is not known."""
        return self._footprint.peak_bytes()

    def timeline(self) -> Timeline:
        """Returns the measured timeline of the last step; every rank calls it together, and all get the same.

        Its memory holds parameters, gradients and optimizer state, not what lives only within the step.
        """
        if self._start is None:
            raise ValueError("no step has run, so there is no timeline")
        offset_ns = clock_offset_ns(self._device, self._group)
        own = (
            self._clock.ns(self._start) - offset_ns,
            [(action, start - offset_ns, end - offset_ns) for action, start, end in self._runner.spans()],
            [(s, self._clock.ns(a) - offset_ns, self._clock.ns(b) - offset_ns) for s, a, b in self._updates],
            self._memory(),
        )
        everyone = [own] * len(self._ranks)
        dist.all_gather_object(everyone, own, group=self._group)
        origin_ns = min(start_ns for start_ns, _, _, _ in everyone)
        memory = dict(zip(self._ranks, (held for _, _, _, held in everyone), strict=True))
        spans, updates = [], []
        for rank, (_, ran, updated, _) in zip(self._ranks, everyone, strict=True):
            spans += [Span(rank, Action(*action), start - origin_ns, end - origin_ns) for action, start, end in ran]
            updates += [Update(rank, s, start - origin_ns, end - origin_ns) for s, start, end in updated]
        return Timeline(
            devices=tuple(device.name for device in self._plan.cluster.devices),
            spans=tuple(spans),
            updates=tuple(updates),
            memory=tuple(memory.get(rank, _NO_MEMORY) for rank in range(len(self._plan.cluster.devices))),
        )

    def _loss(self, loss: Loss) -> Loss:
        """The last stage gives a tuple; the loss wants what the model returns."""
        return loss if self._split.returns_tuple else lambda output, target: loss(output[0], target)

    def _load(self, inputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
        if len(inputs) > len(self.input_names):
            raise ValueError(f"{len(inputs)} inputs for a model that takes {len(self.input_names)}")
        given = dict(zip(self.input_names, inputs, strict=False))
        return {name: self._checked(name, given.get(name), self._split.examples[name]) for name in self.needs}

    def _checked(self, name: str, tensor: Tensor | None, example: Tensor | None) -> Tensor:
        """Returns a tensor on the device, when it is there and like the example."""
        if tensor is None:
            raise BapipeError(f"this rank runs a stage that needs '{name}', which is missing")
        size = tensor.shape[0] if tensor.dim() else 0
        if size != self._plan.minibatch_size:
            raise BapipeError(
                f"'{name}' has {size} samples; the plan's mini-batch is {self._plan.minibatch_size}: "
                "drop or pad a last, smaller batch"
            )
        if example is not None and (tensor.shape[1:], tensor.dtype) != (example.shape[1:], example.dtype):
            raise BapipeError(
                f"'{name}' has samples of {_describe(tensor)}; the example inputs have {_describe(example)}"
            )
        return tensor.to(self._device, non_blocking=True)

    def _update(self, stage: int) -> tuple[int, object, object]:
        start = self._clock.stamp()
        if stage in self._optimizers:
            self._optimizers[stage].step()
        return stage, start, self._clock.stamp()

    def _memory(self) -> Memory:
        parameters = [p for module in self._modules.values() for p in module.parameters()]
        state = [v for o in self._optimizers.values() for held in o.state.values() for v in held.values()]
        return Memory(
            params=sum(p.nbytes for p in parameters),
            gradients=sum(p.grad.nbytes for p in parameters if p.grad is not None),
            optimizer=sum(v.nbytes for v in state if isinstance(v, Tensor)),
            stash=0,
            workspace=0,
            buffers=0,
        )


def check_runnable(plan: Plan) -> tuple[int, ...]:
    """Returns the ranks of the plan that have a stage.

    Raises:
        InvalidSchedule: the plan's order is incomplete, misplaced or deadlocks.
        BapipeError: a stage has replicas or recomputes, which is not executed yet.
    """
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            raise BapipeError(
                f"stage {s} has {len(stage.devices)} devices; stages with replicas are not executed yet: "
                "run a plan with one device a stage"
            )
        if stage.recompute:
            raise BapipeError(
                f"stage {s} recomputes its forward, which is not executed yet: run a plan without recompute"
            )
    schedule = plan.table
    unit = StageCost(forward_ns=1, input_grad_ns=1, weight_grad_ns=1)
    judge(schedule, [Stage(on=(unit,))] * schedule.num_stages, plan.cluster)
    return tuple(sorted({ranks[0] for ranks in schedule.devices}))


def _local_stage(parts: Split, index: int) -> LocalStage:
    stage = parts.stages[index]
    taken = stage.received if index else stage.loaded
    return LocalStage(
        index=index,
        module=stage_module(parts, index),
        received=tuple(parts.examples[name] for name in taken),
        outputs=tuple(parts.examples[name] for name in stage.outputs),
        arguments=argument_names(parts, stage.loaded) if index else (),
    )


def _optimizers(modules: dict[int, nn.Module], make: MakeOptimizer) -> dict[int, Optimizer]:
    trained = {s: [p for p in module.parameters() if p.requires_grad] for s, module in modules.items()}
    return {s: make(parameters) for s, parameters in trained.items() if parameters}


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape[1:])} and type {str(tensor.dtype).removeprefix('torch.')}"
