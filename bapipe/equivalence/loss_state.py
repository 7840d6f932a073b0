"""What a loss keeps from call to call, such as an average in a buffer: to be put back after a comparison."""

from collections.abc import Callable
from typing import Any

from torch import nn

from bapipe.module_state.reached_state import KeptState


def state_of_loss(loss: Callable[..., Any], model: nn.Module) -> KeptState:
    """Returns what a loss keeps now, beside the model: in attributes, closures and globals, and in modules of its own.

    Of these modules the buffers, parameters and parts are followed, too.
    """
    known = (*model.modules(), *model.parameters(), *model.buffers())
    of_model = {id(one) for one in known}
    parts: dict[nn.Module, None] = {}
    while True:
        # Tensors come first: what is met after something that cannot be put back is not followed.
        tensors = [vars(part)[kind] for part in parts for kind in ("_buffers", "_parameters")]
        forwards = [part.forward for part in parts]
        state = KeptState([*tensors, *forwards, loss], known=known)
        reached = (one for one in state.followed.values() if isinstance(one, nn.Module) and id(one) not in of_model)
        found = [part for module in reached for part in module.modules() if id(part) not in of_model]
        if parts.keys() >= set(found):
            return state
        parts |= dict.fromkeys(found)
