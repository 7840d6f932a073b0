"""State of a model that its checkpoints do not hold: they hold parameters and buffers of the module."""

import logging
from collections.abc import Iterator, Sequence

from torch import nn

from bapipe.errors import BapipeError
from bapipe.runtime.tensor_changes import content
from bapipe.tracing.python_state import generator_state, generators_kept, numbers_kept, same_value

_log = logging.getLogger(__name__)


def check_no_extra_state(module: nn.Module) -> None:
    """Raises BapipeError if a module, or a part of it, has extra state: that of torch's modules is any object."""
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            name = f"module '{path}'" if path else "the module"
            raise BapipeError(
                f"{name} ({type(part).__name__}) has extra state (get_extra_state), which checkpoints do not hold, so "
                "a run that resumes would not go on where it stopped: keep it in buffers, or train without `checkpoint`"
            )


class StateOutside:
    """Looks if the steps of a run change what no checkpoint holds.

    That is numbers and random generators that modules or the loss keep in attributes, and the buffers of the loss.
    Other objects, of which a forward may only keep a copy for the user, are not looked at.
    """

    def __init__(self, modules: Sequence[nn.Module], loss: object) -> None:
        """`loss` is looked at if it is a module."""
        self._modules, self._loss = modules, loss
        self._before = dict(self._values())

    def warn_if_changed(self) -> None:
        """Logs a warning that says what has changed, if something has."""
        changed = {
            what for (what, path), value in self._values() if not same_value(self._before.get((what, path)), value)
        }
        if changed:
            _log.warning(
                "no checkpoint holds %s, which a step changes: a run that resumes begins with the first value, so it "
                "differs from one that never stopped; keep such state in buffers of the model",
                " and ".join(sorted(changed)),
            )

    def _values(self) -> Iterator[tuple[tuple[str, str], object]]:
        """Yields ((what it is, its path), a value that can be compared)."""
        for module in self._modules:
            yield from _attributes(module, "")
        if isinstance(self._loss, nn.Module):
            yield from _attributes(self._loss, " of the loss")
            for path, buffer in self._loss.named_buffers():
                if not buffer.is_meta:
                    yield (f"buffer '{path}' of the loss", path), content(buffer)


def _attributes(module: nn.Module, of: str) -> Iterator[tuple[tuple[str, str], object]]:
    for path, number in numbers_kept(module).items():
        yield (f"'{path}'{of}", path), number
    for path, generator in generators_kept(module).items():
        # In a stage the path is that of a copy, which says nothing to the user.
        yield (f"a random generator{of}", path), generator_state(generator)
