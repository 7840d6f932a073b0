"""The optimizers that profiles support: their classes in `torch.optim`, and the size of their state."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bapipe.errors import BapipeError, did_you_mean

MOMENTUM = 0.9
"""Momentum of `sgd-momentum`."""


def check_clip_norm(value: float | None) -> None:
    """Raises BapipeError if gradients cannot be clipped to a norm; None is no clipping."""
    if value is not None and not value > 0:
        raise BapipeError(f"gradients cannot be clipped to a norm of {value}: want more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule:
    """An update rule.

    Attributes:
        torch_class: name of its class in `torch.optim`.
        arguments: of that class, besides the learning rate.
        state_values: values of optimizer state for each value of a parameter.
    """

    torch_class: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    state_values: int


OPTIMIZERS: dict[str, OptimizerRule] = {
    "sgd": OptimizerRule(torch_class="SGD", arguments={"momentum": 0}, state_values=0),
    "sgd-momentum": OptimizerRule(torch_class="SGD", arguments={"momentum": MOMENTUM}, state_values=1),
    "adam": OptimizerRule(torch_class="Adam", state_values=2),
    "adamw": OptimizerRule(torch_class="AdamW", state_values=2),
}
"""By the name that profiles, plans and the command line use."""


def rule_of(torch_class: str, momentum: object) -> str | None:
    """Returns the name that profiles use for a class of `torch.optim`; None if they do not support it.

    `torch_class` may be in upper or lower case. `momentum` distinguishes `sgd` from `sgd-momentum`.
    """
    if torch_class.lower() == "sgd":
        return "sgd-momentum" if momentum else "sgd"
    return next((name for name, rule in OPTIMIZERS.items() if rule.torch_class.lower() == torch_class.lower()), None)


def unknown_optimizer(name: str, known: Iterable[str], where: str = "") -> BapipeError:
    """Returns the error for a name that is none of the known ones, with the one that it resembles.

    Args:
        where: in which argument to give it.
    """
    names = [*known]
    wanted = f"{', '.join(names)}{f' in {where}' if where else ''}"
    return BapipeError(f"unknown optimizer '{name}'; want one of {wanted}{did_you_mean(name.lower(), names)}")
