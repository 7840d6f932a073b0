"""Optimizers by name, the optimizers of a rank's stages, and clipping by the norm of a whole pipeline's gradients."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from reprlib import repr as shortened
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from bapipe.errors import BapipeError, did_you_mean
from bapipe.optimizers import MOMENTUM
from bapipe.runtime.clock import Clock
from bapipe.runtime.collectives_check import optimizer_checked
from bapipe.runtime.gradient_values import gradient_values
from bapipe.runtime.optimizer_state import OptimizerState, load_state, state_of
from bapipe.runtime.other_ranks import is_on_another_rank
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.torch_device import CPU
from bapipe.torch_private.process_groups import num_collectives

OptimizerFactory = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

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
        """Returns the optimizers' state, see `state_of`."""
        return state_of(self.optimizers, parameters)

    def load_state(self, state: OptimizerState, parameters: Mapping[str, nn.Parameter]) -> None:
        """Restores the optimizers' state, see `load_state`."""
        load_state(self.optimizers, state, parameters)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of all optimizers."""
        return [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]


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
