"""Numbers in a model's attributes, which are constants in its stages since the model was traced."""

import logging

from bapipe.module_state.python_state import same_value
from bapipe.tracing.model import TracedModel

_log = logging.getLogger(__name__)


class TracedNumbers:
    """Warns if a training loop changes a number in an attribute of a module whose code was traced.

    A module that is one layer is not traced inside: it runs its own code and sees the change.
    """

    def __init__(self, model: TracedModel) -> None:
        layers = tuple(f"{node.target}." for node in model.module.graph.nodes if node.op == "call_module")
        self._numbers = [  # (the module's attributes, name, path, value)
            (vars(part), name, f"{path}.{name}".lstrip("."), value)
            for path, part in model.root.named_modules()
            if not f"{path}.".startswith(layers)
            for name, value in vars(part).items()
            if isinstance(value, int | float)
        ]

    def warn_of_changes(self) -> None:
        """Warns of attributes that have another value than when the model was traced, once of each."""
        kept = []
        for entry in self._numbers:
            attributes, name, path, value = entry
            now = attributes.get(name)
            if isinstance(now, int | float) and same_value(now, value):
                kept.append(entry)
                continue
            _log.warning(
                "the attribute '%s' was %s when the model was traced and is %s now: stages compute with the first "
                "value. If a forward reads it, make it a buffer, or make its module one layer (`leaf_modules`)",
                path,
                value,
                now,
            )
        self._numbers = kept
