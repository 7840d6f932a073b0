"""Which modules run code from outside torch."""

from collections.abc import Callable

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from bapipe.module_state.whose_code import calls_other_code, written_class


class Own(nn.Linear):
    """A layer of one's own that is nearly torch's."""


def with_forward() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x  # type: ignore[method-assign,assignment]
    return layer


def with_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("made", "other", "written"),
    [
        (lambda: nn.Linear(2, 2), False, nn.Linear),
        (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), False, nn.Linear),
        (lambda: Own(2, 2), True, Own),
        (lambda: parametrizations.spectral_norm(parametrizations.weight_norm(Own(2, 2))), True, Own),
        (with_forward, True, nn.Linear),
        (with_hook, True, nn.Linear),
    ],
)
def test_code_from_outside_torch(made: Callable[[], nn.Module], other: bool, written: type) -> None:
    assert any(map(calls_other_code, made().modules())) == other
    assert written_class(made()) is written
