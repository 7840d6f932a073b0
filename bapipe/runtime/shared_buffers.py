"""Checks that steps do not change buffers that several stages use, which are assumed constant."""

from collections.abc import Collection

from torch import Tensor

from bapipe.errors import InvalidModel
from bapipe.runtime.tensor_changes import TensorChanges
from bapipe.tracing.stages import Split, changing_buffer_in_words, shared_buffers


class SharedBuffers:
    """The buffers that this rank's stages share with others, and that may be changed.

    If the stages were compared with the model, it did not change them on the example inputs; it may do so later.
    """

    def __init__(self, parts: Split, stages: Collection[int]) -> None:
        """`stages` are those of this rank; no buffer of the module may have been dropped yet."""
        self._root, own = parts.model.root, set(stages)
        self._stages_of = {name: users for name, (_, users) in shared_buffers(parts).items() if own & set(users)}
        self._changes = TensorChanges()

    def begin(self) -> None:
        """Remembers the buffers, before a step."""
        self._changes.begin(self._now())

    def finish(self) -> None:
        """Compares the buffers, after a step.

        Raises:
            InvalidModel: the step has changed one.
        """
        for name in sorted(self._changes.changed(self._now())):
            raise InvalidModel(changing_buffer_in_words(name, self._stages_of[name]))

    def _now(self) -> dict[str, Tensor]:
        """Returns the current buffers by name: a forward may have assigned new ones."""
        return {name: self._root.get_buffer(name) for name in self._stages_of}
