"""Notices hooks on layers that add to a collection which only the model's own code empties: no stage runs that."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bapipe.module_state.code_state import reached_by, states_of_hooks
from bapipe.module_state.python_random import all_generators_restored


def hooks_keep_more(module: nn.Module, traced: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Returns whether hooks keep more with each forward of the traced model, and not with the module's own.

    Both run twice on copies of the inputs; the caller restores what they change. If one fails, False.
    """
    if not states_of_hooks(module):
        return False
    try:
        return bool(_growing(module, traced, inputs) - _growing(module, module, inputs))
    except Exception:  # whatever the model's own code raises
        return False


def _growing(module: nn.Module, run: Callable[..., object], inputs: Sequence[Tensor]) -> set[int]:
    """Returns the ids of collections that the hooks of a module reach, and that grow from one run to the next."""
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    device = inputs[0].device if inputs else None
    for sizes in (before, after):
        with torch.no_grad(), all_generators_restored(device):
            run(*(tensor.clone() for tensor in inputs))
        reached = reached_by(states_of_hooks(module)).values()
        sizes |= {id(one): len(one) for one in reached if isinstance(one, list | dict | set | deque)}
    return {one for one, size in after.items() if size > before.get(one, size)}
