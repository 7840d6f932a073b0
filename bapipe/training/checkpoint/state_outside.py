"""Finds state of a model that its checkpoints do not hold: they hold only parameters and buffers of the module."""

import logging
from collections.abc import Iterator, Sequence

from torch import nn

from bapipe.errors import BapipeError
from bapipe.module_state.python_state import generator_state, generators_kept, numbers_kept, same_value
from bapipe.runtime.tensor_changes import content

_log = logging.getLogger(__name__)


def check_no_extra_state(module: nn.Module) -> None:
    """Raises BapipeError if a module, or a part of it, has extra state (`get_extra_state`), which may be any object."""
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            name = f"module '{path}'" if path else "the module"
            raise BapipeError(
                f"{name} ({type(part).__name__}) has extra state (get_extra_state), which checkpoints do not hold, so "
                "a run that resumes would not go on where it stopped: keep it in buffers, or train without `checkpoint`"
            )


class StateOutside:
    """Finds out whether the steps of a run change state that no checkpoint holds.

    This state is numbers and random generators in attributes of modules or the loss, and buffers of the loss. Other
    objects are not examined: a forward may keep them only for the user.
    """

    def __init__(self, modules: Sequence[nn.Module], loss: object) -> None:
        """`loss` is examined if it is a module."""
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
        """Yields ((description, path), value that can be compared) of all state that is examined."""
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
        # The path in a stage's module would mean nothing to the user.
        yield (f"a random generator{of}", path), generator_state(generator)
