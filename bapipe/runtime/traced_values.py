"""Plain values that code has read while it was traced, and which are constants in the stages since."""

import logging
from typing import Any

from bapipe.module_state.named_values import GONE, PLAIN, named_values
from bapipe.module_state.python_state import same_value
from bapipe.tracing.model import TracedModel

_log = logging.getLogger(__name__)

_NUMBERS = (int, float)


class TracedValues:
    """Warns if a training loop changes a number, flag, text or None that the traced code of modules may have read.

    A module that is one layer is not traced inside: it runs its own code and sees the change.
    """

    def __init__(self, model: TracedModel) -> None:
        layers = tuple(f"{node.target}." for node in model.module.graph.nodes if node.op == "call_module")
        parts = {path: part for path, part in model.root.named_modules() if not f"{path}.".startswith(layers)}
        self._places = named_values(parts)

    def warn_of_changes(self) -> None:
        """Warns of values that are not what they were when the model was traced, once of each."""
        for place in [place for place in self._places if not place.is_unchanged()]:
            for key, now in place.changed():
                before = place.values[key]
                if _same(before, now):
                    continue
                place.forget(key)
                _log.warning(
                    "%s was %s when the model was traced and is %s now: stages compute with the first value. If a "
                    "forward reads it, %smake its module one layer (`leaf_modules`)",
                    place.name(key),
                    _in_words(before),
                    _in_words(now),
                    "make it a buffer, or " if isinstance(before, _NUMBERS) and isinstance(now, _NUMBERS) else "",
                )


def _same(before: Any, now: Any) -> bool:
    """Returns whether a value is the same, or another object that holds the same."""
    if isinstance(before, PLAIN):
        return isinstance(now, PLAIN) and same_value(before, now)
    try:
        return type(before) is type(now) and bool(before == now or vars(before) == vars(now))
    except Exception:  # whatever an object of the user's raises when it is compared
        return False


def _in_words(value: object) -> str:
    if value is GONE:
        return "not there"
    if isinstance(value, str):
        return repr(value[:40])
    return str(value) if isinstance(value, PLAIN) else f"an object of type {type(value).__name__}"
