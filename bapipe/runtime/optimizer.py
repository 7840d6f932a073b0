"""Optimizers by name, the optimizers of a rank's stages, and clipping by the norm of a whole pipeline's gradients."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from reprlib import repr as shortened
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from bapipe.errors import BapipeError, did_you_mean
from bapipe.optimizers import MOMENTUM
from bapipe.runtime.clock import Clock
from bapipe.runtime.collectives_check import optimizer_checked
from bapipe.runtime.gradient_values import gradient_values
from bapipe.runtime.other_ranks import is_on_another_rank
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.torch_device import CPU
from bapipe.torch_private.process_groups import num_collectives

OptimizerFactory = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

Number = bool | int | float

TORCH_OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and name not in ("Optimizer", "LBFGS")
}
"""The optimizers of `torch.optim` by lower-case name; without LBFGS, which runs the model several times per step."""


def sgd(lr: float = 0.01, momentum: float = MOMENTUM) -> OptimizerFactory:
    """Returns a factory of SGD optimizers."""
    return lambda parameters: optim.SGD(parameters, lr=lr, momentum=momentum)


def optimizer_factory(name: str, learning_rate: float, arguments: Mapping[str, object]) -> OptimizerFactory:
    """Returns a factory of optimizers of a class of `torch.optim`; the name's case does not matter.

    Raises:
        BapipeError: there is no such class, it is LBFGS, or it does not take the arguments.
    """
    kind = TORCH_OPTIMIZERS.get(name.lower())
    if name.lower() == "lbfgs":
        raise _runs_the_model(name)
    if kind is None:
        hint = did_you_mean(name.lower(), TORCH_OPTIMIZERS) or f": want one of {', '.join(sorted(TORCH_OPTIMIZERS))}"
        raise BapipeError(f"torch.optim has no optimizer '{name}'{hint}")

    def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        try:
            return kind(parameters, lr=learning_rate, **arguments)
        except (TypeError, ValueError) as error:
            listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "nothing else"
            raise BapipeError(f"{name} cannot be made with lr={learning_rate:g} and {listed}: {error}") from None

    make([nn.Parameter(torch.zeros(1, 1, device=CPU))])  # wrong arguments fail here, not in every rank that has started
    return make


def _runs_the_model(name: str) -> BapipeError:
    return BapipeError(
        f"optimizer '{name}' runs the model several times per step, which a pipeline does not: want one of "
        f"{', '.join(sorted(TORCH_OPTIMIZERS))}"
    )


def check_optimizer_factory(make: object) -> None:
    """Raises BapipeError if `make` cannot be called to make the optimizers of stages, such as an optimizer itself."""
    if not callable(make):
        given = f"'{make}'" if isinstance(make, str) else f"an object of type {type(make).__name__}"
        raise BapipeError(
            f"`optimizer` is {given}; want a function that makes the optimizer of a stage's parameters, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )


class OptimizerState(TypedDict):
    """The state of a rank's optimizers, by `name of the parameter:key`, in types that `torch.load` reads.

    Attributes:
        tensors, numbers: the state of each parameter, such as its momentum.
        options: the options of each parameter's group, such as the learning rate that a scheduler has set; numbers and
            tuples of them.
        grad_scaler: `scale` and `growth_tracker` of loss scaling, the same on every rank.
    """

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Number]
    options: NotRequired[Mapping[str, Number | tuple[Number, ...]]]
    grad_scaler: NotRequired[Mapping[str, Any]]


class StageOptimizers:
    """One optimizer per stage of this rank, so that a stage is updated as soon as its own gradients are final.

    A parameter that several stages of this rank use belongs to the first of them.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        make: OptimizerFactory,
        clock: Clock,
        layout: ProcessLayout | None = None,
    ) -> None:
        """Makes the optimizers.

        With a `layout`, they may not exchange gradients or weights with processes of other stages, neither here nor in
        their steps.
        """
        self._modules, self._clock, self._layout = modules, clock, layout
        self._unchecked = set(modules)  # stages
        self._frozen = {
            name: p for module in modules.values() for name, p in module.named_parameters() if not p.requires_grad
        }
        self._optimizers: dict[int, optim.Optimizer] = {}
        self._updates: list[tuple[int, object, object]] = []
        taken: set[int] = set()
        for s, module in modules.items():
            trained = [p for p in module.parameters() if p.requires_grad and id(p) not in taken]
            taken |= {id(p) for p in trained}
            if trained:
                with optimizer_checked(layout, s, len(trained)):
                    made = make(trained)
                _check_optimizer(made)
                _check_own(made, trained, modules.values())
                self._optimizers[s] = made

    @property
    def optimizers(self) -> tuple[optim.Optimizer, ...]:
        """The optimizers, in the order of the stages given."""
        return tuple(self._optimizers.values())

    @property
    def updates(self) -> tuple[tuple[int, object, object], ...]:
        """(stage, start, end) of each update of the last step; start and end are stamps of the clock."""
        return tuple(self._updates)

    def busy_ns(self) -> int:
        """Returns the total time of the updates of the last step."""
        return sum(self._clock.ns(end) - self._clock.ns(start) for _, start, end in self._updates)

    def zero_grad(self) -> None:
        """Drops the gradients of the last step, also of parameters without an optimizer; to be called before a step."""
        self._updates.clear()
        for module in self._modules.values():
            module.zero_grad(set_to_none=True)  # zeroing would cost one pass to fill and another to add

    def check_frozen(self) -> None:
        """Raises BapipeError if a parameter requires gradients that did not when the optimizers were made."""
        unfrozen = next((name for name, parameter in self._frozen.items() if parameter.requires_grad), None)
        if unfrozen is not None:
            raise BapipeError(
                f"'{unfrozen}' requires gradients now, but was frozen when the Pipeline was made, so its optimizers "
                "would not train it: let all parameters that will be trained require gradients when the Pipeline is "
                "made, and freeze them afterwards; or make a new Pipeline"
            )

    def step(self, stage: int) -> None:
        """Updates a stage's parameters from their gradients."""
        start = self._clock.stamp()
        if stage in self._optimizers:
            self._run(stage)
        self._updates.append((stage, start, self._clock.stamp()))

    def _run(self, stage: int) -> None:
        """Runs a stage's optimizer; checks its collectives in the first step, and in each after a step with any."""
        optimizer, layout = self._optimizers[stage], self._layout
        if layout is None:
            optimizer.step()
            return
        before = num_collectives(None)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with optimizer_checked(layout if stage in self._unchecked else None, stage, len(parameters)):
            optimizer.step()
        if num_collectives(None) == before:
            self._unchecked.discard(stage)
        else:  # it may exchange more in a later step, such as one that averages weights every few steps
            self._unchecked.add(stage)

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of the following updates.

        Raises:
            BapipeError: groups of parameters have different ones, such as one per layer.
        """
        rates = sorted({float(group["lr"]) for group in self._groups if group.get("lr") is not None})
        if len(rates) > 1:
            raise BapipeError(
                f"the groups of parameters that `optimizer` made have learning rates of {', '.join(map(str, rates))}, "
                "and would all get the same one: let that function keep the optimizers that it makes, as in a list, "
                'and set the "lr" of each of their `param_groups`, as learning-rate schedulers do'
            )
        for group in self._groups:
            group["lr"] = value

    def state_bytes(self) -> int:
        """Returns the bytes of the optimizers' state, such as momentum."""
        states = (state for optimizer in self._optimizers.values() for state in optimizer.state.values())
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def state(self, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
        """Returns the optimizers' state of named parameters, which are all that they may have.

        Raises:
            BapipeError: an optimizer has others, such as copies of them in float32.
        """
        self._check_named(parameters)
        values = {
            f"{name}:{key}": value
            for name, parameter in parameters.items()
            for optimizer in self._optimizers.values()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        group_of = {id(parameter): group for group in self._groups for parameter in group["params"]}
        return OptimizerState(
            tensors={name: value for name, value in values.items() if isinstance(value, Tensor)},
            numbers={name: value for name, value in values.items() if isinstance(value, Number)},
            options={
                f"{name}:{key}": value.item() if hasattr(value, "item") else value  # numbers of numpy, too
                for name, parameter in parameters.items()
                for key, value in group_of.get(id(parameter), {}).items()
                if isinstance(value, Number | tuple | Tensor)
            },
        )

    def load_state(self, state: OptimizerState, parameters: Mapping[str, nn.Parameter]) -> None:
        """Restores the state of these parameters from what `state` returned; that of other parameters is ignored.

        An option is restored if it was the same for all parameters of a group.

        Raises:
            BapipeError: it is the state of another optimizer, or lacks some of these parameters, or is no such state;
                or an optimizer has other parameters.
        """
        self._check_named(parameters)
        if not isinstance(state, Mapping) or not {"tensors", "numbers"} <= state.keys():
            found = f"a dictionary of {', '.join(map(repr, state))}" if isinstance(state, Mapping) else shortened(state)
            raise BapipeError(f"`state` is {found}: want what `optimizer_state` of a Pipeline returned")
        options = state.get("options", {})
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        _check_covers(state, {name_of[id(p)] for group in self._groups for p in group["params"]})
        by_parameter: dict[str, dict[str, Tensor | Number]] = {name: {} for name in parameters}
        for full_name, value in (*state["tensors"].items(), *state["numbers"].items()):
            name, _, key = full_name.rpartition(":")
            if name in by_parameter:
                by_parameter[name][key] = value
        for optimizer in self._optimizers.values():
            every = [p for group in optimizer.param_groups for p in group["params"]]
            for group in optimizer.param_groups:
                _check_keys(optimizer, group, [by_parameter[name_of[id(p)]] for p in group["params"]])
            # torch numbers the parameters of an optimizer over all its groups.
            by_index = {index: values for index, p in enumerate(every) if (values := by_parameter[name_of[id(p)]])}
            optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
            for index, values in by_index.items():
                _restore_dtypes(optimizer.state[every[index]], values)
            for group in optimizer.param_groups:
                names = [name_of[id(p)] for p in group["params"]]
                for key in {full_name.rpartition(":")[2] for full_name in options}:
                    saved = {options.get(f"{name}:{key}") for name in names}
                    if len(saved) == 1 and None not in saved:
                        _set_option(group, key, saved.pop())

    def _check_named(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raises BapipeError if an optimizer has a parameter that is none of these, by whose names states are kept."""
        named = {id(parameter) for parameter in parameters.values()}
        for optimizer in self._optimizers.values():
            own = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in named]
            if own:
                raise BapipeError(
                    f"the optimizer {type(optimizer).__name__} has {len(own)} parameters that are none of the module, "
                    f"such as one of shape {tuple(own[0].shape)} and {own[0].dtype}: states are saved and loaded by "
                    "the names of the module's, and these have none. Let `optimizer` keep the optimizers that it "
                    "makes, as in a list, and save and load their `state_dict()` and their parameters, under the same "
                    "plan"
                )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of all optimizers."""
        return [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]


def _check_covers(state: OptimizerState, own: set[str]) -> None:
    """Raises BapipeError if a state lacks some of `own`, the names of the parameters of this rank's optimizers.

    Without options, as in checkpoints, it is refused only if it lacks all of them: a parameter that has had no gradient
    yet has no other state.
    """
    options = state.get("options", {})
    saved = {name.rpartition(":")[0] for name in (*state["tensors"], *state["numbers"], *options)}
    missing = own - saved
    if saved and missing and (options or missing == own):
        raise BapipeError(
            f"the state is of '{min(saved)}' and others, and not of '{min(missing)}', which this rank has: give "
            "each rank the states of all ranks together, or that of its own parameters"
        )


def _check_optimizer(optimizer: object) -> None:
    """Raises BapipeError for an object that is no optimizer, or an optimizer that runs the model itself."""
    if not hasattr(optimizer, "param_groups"):  # wrappers of optimizers need not be of torch's class
        raise BapipeError(f"`optimizer` returned {shortened(optimizer)}: want a function that returns an optimizer")
    if isinstance(optimizer, optim.LBFGS):
        raise _runs_the_model("LBFGS")


def _check_own(optimizer: optim.Optimizer, given: Iterable[nn.Parameter], modules: Iterable[nn.Module]) -> None:
    """Raises BapipeError if an optimizer has parameters of other stages.

    Those that it made itself are allowed, such as copies in float32. They are its own to keep: no state has them, and
    values that the module's parameters are given later do not reach them.
    """
    foreign = {id(p) for module in modules for p in module.parameters()} - {id(p) for p in given}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    others = [p for p in every if id(p) in foreign or is_on_another_rank(p)]
    if others:
        raise BapipeError(
            f"`optimizer` made an optimizer with {len(others)} parameters of other stages, such as one of shape "
            f"{tuple(others[0].shape)}: each stage has an optimizer of its own, so use only the parameters that the "
            "function is called with; their names are in `{id(p): name for name, p in module.named_parameters()}`"
        )


def _set_option(group: dict[str, Any], key: str, value: object) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _check_keys(
    optimizer: optim.Optimizer, group: Mapping[str, Any], states: Iterable[Mapping[str, Tensor | Number]]
) -> None:
    """Raises BapipeError if saved states of a group's parameters, in order, have other keys than the optimizer's."""
    made: dict[int, frozenset[str] | None] = {}  # by the parameter's number of dimensions
    for p, values in zip(group["params"], states, strict=True):
        if p.dim() not in made:
            made[p.dim()] = _keys_made(optimizer, group, p)
        expected, found = made[p.dim()], frozenset(values)
        if found and expected is not None and found != expected:
            have, want = (", ".join(sorted(keys)) or "none" for keys in (found, expected))
            raise BapipeError(f"the checkpoint has the state of another optimizer: {have}; this one makes {want}")


def _restore_dtypes(loaded: dict[str, Any], saved: Mapping[str, Tensor | Number]) -> None:
    """Restores the dtype of state tensors: torch has cast all but `step` to the parameter's dtype.

    NAdam's product of momenta and ASGD's step size are in float32, also for parameters in bfloat16 or float64.
    """
    for key, value in saved.items():
        if isinstance(value, Tensor) and value.dtype != loaded[key].dtype:
            loaded[key] = value.to(loaded[key].device)


def _keys_made(like: optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> frozenset[str] | None:
    """Returns the keys of an optimizer's state for a parameter, found by a step on one of a single element.

    The step is made by a new optimizer of the same class, with the options of a group; the factory is not called, as it
    may keep what it makes. None if the class is not torch's, as it may have options that are in no group, or if the
    step fails, as with an optimizer for sparse gradients.
    """
    if not type(like).__module__.startswith("torch.optim"):
        return None
    shape = (1,) * parameter.dim()
    tiny = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    tiny.grad = torch.zeros_like(tiny)
    make: Callable[..., optim.Optimizer] = type(like)
    try:
        optimizer = make([{**group, "params": [tiny]}])
        optimizer.step()
    except Exception:  # whatever the optimizer of a user raises
        return None
    return frozenset(key for key, value in optimizer.state[tiny].items() if isinstance(value, Tensor | Number))


def clip_grad_norm(
    gradients: Iterable[Tensor],
    counted: Iterable[Tensor],
    max_norm: float,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Scales gradients so that the norm of all ranks' counted ones is at most `max_norm`; returns the norm before.

    Equals `torch.nn.utils.clip_grad_norm_` of the whole model in one process. `counted` are the gradients that this
    rank contributes to the norm: what several ranks hold (replicas, tied weights) must be counted on one of them.
    Every rank of the group calls it together.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for values in map(gradient_values, counted):
        real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        squares += torch.linalg.vector_norm(real, dtype=torch.float64) ** 2
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
