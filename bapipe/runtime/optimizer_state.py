"""The state of optimizers by the names of the parameters: what is saved, and restored on other stages, too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import repr as shortened
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn, optim

from bapipe.errors import BapipeError

Number = bool | int | float

_BY_ONESELF = (
    "Let `optimizer` keep the optimizers that it makes, as in a list, and save and load their `state_dict()`{more}, "
    "under the same plan"
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


def joined(states: Sequence[OptimizerState]) -> OptimizerState:
    """Returns the states of several processes in one.

    Raises:
        BapipeError: there are none, or one is no state of optimizers.
    """
    if not states:
        raise BapipeError("there is no state to load: give what `optimizer_state` returned, in one process or several")
    for state in states:
        if not isinstance(state, Mapping) or not {"tensors", "numbers"} <= state.keys():
            found = f"a dictionary of {', '.join(map(repr, state))}" if isinstance(state, Mapping) else shortened(state)
            raise BapipeError(f"`state` is {found}: want what `optimizer_state` of a Pipeline returned")
    every = OptimizerState(
        tensors={name: value for state in states for name, value in state["tensors"].items()},
        numbers={name: value for state in states for name, value in state["numbers"].items()},
        options={name: value for state in states for name, value in state.get("options", {}).items()},
    )
    scaler = next((state["grad_scaler"] for state in states if "grad_scaler" in state), None)
    if scaler is not None:
        every["grad_scaler"] = scaler
    return every


def state_of(optimizers: Iterable[optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Returns the state of optimizers for named parameters, which are all that they may have.

    Raises:
        BapipeError: an optimizer has other parameters, such as copies of them in float32, or keeps what is no tensor
            or number of a parameter.
    """
    tensors, numbers = dict[str, Tensor](), dict[str, Number]()
    options = dict[str, Number | tuple[Number, ...]]()
    for optimizer in optimizers:
        _check_named(optimizer, parameters)
        state = _by_parameter(optimizer)
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in parameters.items():
            for key, value in state.get(parameter, {}).items():
                value = _plain(value)
                if isinstance(value, Tensor):
                    tensors[f"{name}:{key}"] = value
                elif isinstance(value, Number):
                    numbers[f"{name}:{key}"] = value
                elif value is not None:
                    raise _cannot_be_named(optimizer, f"a {type(value).__name__} as '{key}' of a parameter")
            for key, value in group_of.get(id(parameter), {}).items():
                value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else _plain(value)
                if isinstance(value, Number):
                    options[f"{name}:{key}"] = value
                elif isinstance(value, list | tuple) and all(isinstance(one, Number) for one in value):
                    options[f"{name}:{key}"] = tuple(value)
    return OptimizerState(tensors=tensors, numbers=numbers, options=options)


def load_state(
    optimizers: Iterable[optim.Optimizer], state: OptimizerState, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Restores the state of these parameters from what `state_of` returned; that of other parameters is ignored.

    An option is restored if it was the same for all parameters of a group.

    Raises:
        BapipeError: it is the state of another optimizer, or lacks some of these parameters, or is no such state; or an
            optimizer has other parameters, or keeps what is no tensor or number of a parameter.
    """
    state, optimizers = joined([state]), list(optimizers)
    for optimizer in optimizers:
        _check_named(optimizer, parameters)
        _by_parameter(optimizer)
    options = state["options"]
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    own = {name_of[id(p)] for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    _check_covers(state, own)
    saved_of: dict[str, dict[str, Tensor | Number]] = {name: {} for name in parameters}
    for full_name, value in (*state["tensors"].items(), *state["numbers"].items()):
        name, _, key = full_name.rpartition(":")
        if name in saved_of:
            saved_of[name][key] = value
    for optimizer in optimizers:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        for group in optimizer.param_groups:
            _check_keys(optimizer, group, [saved_of[name_of[id(p)]] for p in group["params"]])
        # torch numbers the parameters of an optimizer over all its groups.
        by_index = {index: values for index, p in enumerate(every) if (values := saved_of[name_of[id(p)]])}
        optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
        loaded = _by_parameter(optimizer)
        for index, values in by_index.items():
            _restore_dtypes(loaded[every[index]], values)
        for group in optimizer.param_groups:
            names = [name_of[id(p)] for p in group["params"]]
            for key in {full_name.rpartition(":")[2] for full_name in options}:
                saved = {options.get(f"{name}:{key}") for name in names}
                if len(saved) == 1 and None not in saved:
                    _set_option(group, key, saved.pop())


def _by_parameter(optimizer: optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Returns the state of an optimizer's parameters, as its own `state_dict` has it: one that is around another
    optimizer gives that one's.

    Raises:
        BapipeError: it has more than that.
    """
    given = optimizer.state_dict()
    if not isinstance(given, Mapping):
        raise _cannot_be_named(optimizer, f"a {type(given).__name__} as its `state_dict()`")
    more = [key for key in given if key not in ("state", "param_groups")]
    if more or "state" not in given:
        raise _cannot_be_named(optimizer, f"{', '.join(map(shortened, more)) or 'no state'} in its `state_dict()`")
    every = [p for group in optimizer.param_groups for p in group["params"]]
    others = [key for key in given["state"] if not (isinstance(key, int) and key < len(every))]
    if others:
        raise _cannot_be_named(optimizer, f"{shortened(others[0])} in its state, which is no parameter's")
    return {every[index]: values for index, values in given["state"].items()}


def _cannot_be_named(optimizer: optim.Optimizer, what: str) -> BapipeError:
    return BapipeError(
        f"the optimizer {type(optimizer).__name__} keeps {what}: only tensors and numbers of parameters are saved and "
        f"loaded, by their names. {_BY_ONESELF.format(more='')}"
    )


def _plain(value: object) -> object:
    """Returns a number of numpy as one of Python's, anything else as it is."""
    is_of_numpy = not isinstance(value, Tensor) and getattr(value, "ndim", None) == 0
    return value.item() if is_of_numpy else value  # type: ignore[attr-defined]


def _check_named(optimizer: optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises BapipeError if an optimizer has a parameter that is none of these, by whose names states are kept."""
    named = {id(parameter) for parameter in parameters.values()}
    own = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in named]
    if own:
        raise BapipeError(
            f"the optimizer {type(optimizer).__name__} has {len(own)} parameters that are none of the module, such as "
            f"one of shape {tuple(own[0].shape)} and {own[0].dtype}: states are saved and loaded by the names of the "
            f"module's, and these have none. {_BY_ONESELF.format(more=' and their parameters')}"
        )


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


def _set_option(group: dict[str, Any], key: str, value: object) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    elif isinstance(group.get(key), list) and isinstance(value, tuple):
        group[key] = [*value]
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
