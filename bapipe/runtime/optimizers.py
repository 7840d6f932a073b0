"""Optimizers by name, and the norm of all gradients of a pipeline."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from bapipe.errors import BapipeError
from bapipe.runtime.train_config import MOMENTUM

MakeOptimizer = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

_KNOWN: dict[str, Callable[..., optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and name not in ("Optimizer", "LBFGS")
}  # LBFGS runs the model itself, several times a step


def sgd(lr: float = 0.01, momentum: float = MOMENTUM) -> MakeOptimizer:
    """Returns a maker of SGD optimizers."""
    return lambda parameters: optim.SGD(parameters, lr=lr, momentum=momentum)


def optimizer(name: str, learning_rate: float, arguments: Mapping[str, object]) -> MakeOptimizer:
    """Returns a maker of optimizers of a class of `torch.optim`, named in any case.

    Raises:
        BapipeError: no such class, or it does not take the arguments.
    """
    kind = _KNOWN.get(name.lower())
    if kind is None:
        close = get_close_matches(name.lower(), _KNOWN, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else f": want one of {', '.join(sorted(_KNOWN))}"
        raise BapipeError(f"torch.optim has no optimizer '{name}'{hint}")
    given = dict(arguments) or ({"momentum": MOMENTUM} if name.lower() == "sgd" else {})

    def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        try:
            return kind(parameters, lr=learning_rate, **given)
        except (TypeError, ValueError) as error:
            said = ", ".join(f"{key}={value!r}" for key, value in given.items()) or "nothing else"
            raise BapipeError(f"{name} cannot be made with lr={learning_rate:g} and {said}: {error}") from None

    make([nn.Parameter(torch.zeros(1, 1))])  # says now what it does not take
    return make


def clip(
    gradients: Iterable[Tensor],
    counted: Iterable[Tensor],
    max_norm: float,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Scales gradients so that the norm of all ranks' counted ones is at most `max_norm`; returns the norm before.

    `counted` is this rank's part of the whole: what several ranks hold is counted on one. As
    `torch.nn.utils.clip_grad_norm_` does in one process. Every rank of the group calls it together.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in counted:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
