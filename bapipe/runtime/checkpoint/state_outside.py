"""State of a model that its checkpoints do not hold: they hold parameters and buffers."""

from torch import nn

from bapipe.errors import BapipeError


def check_no_extra_state(module: nn.Module) -> None:
    """Raises BapipeError if a module, or a part of it, has extra state: that of torch's modules is any object."""
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            name = f"module '{path}'" if path else "the module"
            raise BapipeError(
                f"{name} ({type(part).__name__}) has extra state (get_extra_state), which checkpoints do not hold, so a "
                "run that resumes would not go on where it stopped: keep it in buffers, or train without `checkpoint`"
            )
