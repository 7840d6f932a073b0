"""Finds collections that grow in stages and not in the original: only code that no stage runs empties them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bapipe.equivalence.handed_on import innermost_around
from bapipe.equivalence.outcome import Microbatch, trial
from bapipe.module_state.assigned_attributes import names_in_forward
from bapipe.module_state.code_state import ForwardCode
from bapipe.module_state.python_state import plain_attributes
from bapipe.module_state.reached_state import KeptState
from bapipe.module_state.whose_code import calls_other_code
from bapipe.torch_private.modules import hooks_of
from bapipe.tracing.model import TracedModel

_ADDS = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"})
"""Methods that add to a list, a deque, a set or a dictionary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """A collection that grows.

    Attributes:
        what: it, in words.
        layer: the first that adds to it.
        path: of the innermost module around those that add to it; empty for the whole model.
    """

    what: str
    layer: str
    path: str


def growing_collection(model: TracedModel, microbatch: Microbatch) -> Growing | None:
    """Returns a collection that calls of layers add to with each forward, and that the original empties; None if none.

    Both run twice, if code of hooks or layers adds to anything. The model is afterwards as it was.
    """
    layers = {layer.name.partition("#")[0] for layer in model.layers}
    called = [path for path, _ in model.root.named_modules() if path in layers]
    if not any(_may_add(model.root.get_submodule(path)) for path in called):
        return None
    with trial(model.root) as one, torch.no_grad():

        def run(number: int, call: Callable[..., object]) -> None:
            one.begin_forward(number)
            call(*microbatch.copy().inputs)

        run(0, model.module)
        noting = _Noting(model, list(_collections(model.root)))
        run(1, noting.run)
        growing = [(held, _in_words(model.root, held), layers) for held, layers in noting.growing()]
        if not growing:
            return None
        run(0, model.root)
        sizes = [(held, len(held)) for held in _collections(model.root)]
        run(1, model.root)
        in_original = {id(held) for held, size in sizes if len(held) > size}
        for held, what, adding in growing:
            if id(held) not in in_original:
                return Growing(what=what, layer=adding[0], path=innermost_around(model.root, adding))
    return None


def _may_add(layer: nn.Module) -> bool:
    """Returns whether a layer has a hook, or code that may add to a collection."""
    return any(
        hooks_of(part) or not _ADDS.isdisjoint(names_in_forward(part))
        for part in layer.modules()
        if calls_other_code(part)
    )


def _collections(root: nn.Module) -> Iterator[Any]:
    """Yields the collections that hooks and forwards of a module reach, those in its attributes included."""
    code = ForwardCode.of(root)
    hooks = [hook for part in root.modules() for hook in hooks_of(part)]
    attributes = [value for part in root.modules() for value in plain_attributes(part).values()]
    state = KeptState([*hooks, *code.code, *attributes], known=(*root.modules(), *root.parameters(), *root.buffers()))
    yield from (one for one in state.followed.values() if isinstance(one, list | dict | set | deque))


class _Noting(fx.Interpreter):
    """Runs a model; notes the layers that add to collections."""

    def __init__(self, model: TracedModel, collections: Sequence[Any]) -> None:
        super().__init__(model.module)
        self._layer_of, self._collections = model.layer_of, collections
        self._first = self._sizes()
        self._adding: dict[int, list[str]] = {}  # layers by the place of a collection

    def run_node(self, n: fx.Node) -> Any:
        before = self._sizes()
        value = super().run_node(n)
        for place, (size, now) in enumerate(zip(before, self._sizes(), strict=True)):
            if now > size:
                self._adding.setdefault(place, []).append(self._layer_of[n])
        return value

    def growing(self) -> list[tuple[Any, list[str]]]:
        """Returns the collections that are larger than when this was made, each with the layers that add to it."""
        now = self._sizes()
        return [(self._collections[n], one) for n, one in self._adding.items() if now[n] > self._first[n]]

    def _sizes(self) -> list[int]:
        return [len(one) for one in self._collections]


def _in_words(root: nn.Module, held: Any) -> str:
    kind = type(held).__name__
    names = (
        f"{path}.{name}".lstrip(".")
        for path, part in root.named_modules()
        for name, value in plain_attributes(part).items()
        if value is held
    )
    name = next(names, None)
    return f"a {kind}" if name is None else f"the {kind} '{name}'"
