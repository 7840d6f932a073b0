"""Refuses hooks on layers that add to a collection which only the model's own code empties: no stage runs that."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.module_state.code_state import reached_by, states_of_hooks
from bapipe.module_state.python_random import all_generators_restored


def check_hooks_keep_no_more(module: nn.Module, traced: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raises InvalidModel if hooks keep more with each forward of the traced model, and not with the module's own.

    Both run twice on copies of the inputs; the caller restores what they change. If one fails, nothing is checked.
    """
    try:
        own, of_trace = _growing(module, module, inputs), _growing(module, traced, inputs)
    except Exception:  # whatever the model's own code raises
        return
    if of_trace - own:
        raise InvalidModel(
            "hooks on its layers add to a list, or another collection, that the forward of the whole model empties, "
            "which no stage runs, so that it would grow with each micro-batch: let each hook assign what it keeps, "
            "such as to an entry of a dictionary"
        )


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
