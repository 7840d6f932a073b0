"""Buffers that several stages use are taken for constants: a step that changes one is refused."""

from collections.abc import Collection

from torch import Tensor

from bapipe.errors import InvalidModel
from bapipe.runtime.tensor_changes import TensorChanges
from bapipe.tracing.stages import Split, changing_buffer_in_words, shared_buffers


class SharedBuffers:
    """The buffers that this rank's stages share with others, and that code from outside torch may change.

    That it does not is known of the example inputs, if the stages were compared with the model; it may begin later.
    """

    def __init__(self, parts: Split, stages: Collection[int]) -> None:
        """`stages` are those of this rank; the module has all of its buffers."""
        self._root, own = parts.model.root, set(stages)
        self._stages_of = {name: users for name, (_, users) in shared_buffers(parts).items() if own & set(users)}
        self._changes = TensorChanges()

    def begin(self) -> None:
        """Looks at the buffers before a step."""
        self._changes.begin(self._now())

    def finish(self) -> None:
        """Looks at the buffers after a step.

        Raises:
            InvalidModel: the step has changed one.
        """
        for name in sorted(self._changes.changed(self._now())):
            raise InvalidModel(changing_buffer_in_words(name, self._stages_of[name]))

    def _now(self) -> dict[str, Tensor]:
        """Returns the buffers of now, since a forward may assign others."""
        return {name: self._root.get_buffer(name) for name in self._stages_of}
