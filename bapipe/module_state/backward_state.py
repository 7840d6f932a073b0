"""What a micro-batch's forward leaves in a stage's modules is what its backward finds there.

Code of a model's own may run in backwards: `torch.autograd.Function`, hooks of tensors and modules. It may read what
the forward has kept in an attribute or a buffer, such as the state of the random generator that a reversible layer
starts from once more. In one process a backward follows its forward; in a pipeline later forwards come between.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import NamedTuple

from torch import Tensor, fx, nn

from bapipe.module_state.whose_code import calls_other_code
from bapipe.torch_private.modules import is_scripted
from bapipe.torch_private.tensors import version

_SMALL_BYTES = 2**20
"""Buffers up to this size are copied before the first F changes them, larger ones only after that."""

_ABSENT = object()
"""In place of an attribute that a module does not have."""


class _Name(NamedTuple):
    """An attribute or a buffer of a module, which is `parts[part]`."""

    part: int
    name: str
    is_buffer: bool


class _Buffer(NamedTuple):
    """A buffer with the count of writes to it, and a copy of its value then; None if it is large and was constant."""

    tensor: Tensor
    version: int
    copy: Tensor | None


@dataclass(slots=True)
class BackwardState:
    """The attributes and buffers of a stage's modules, as far as forwards change them, by micro-batch.

    Of modules of torch's own classes without hooks nothing is kept: none of their code runs in a backward. What an
    attribute refers to is not copied.

    Attributes:
        modules: all modules of the stage.
    """

    modules: Sequence[nn.Module]
    _parts: list[nn.Module] = field(default_factory=list)
    _kept: dict[int, dict[_Name, object]] = field(default_factory=dict)
    _changing: set[_Name] = field(default_factory=set)
    _buffers: dict[_Name, _Buffer] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Forgets the micro-batches of the step before, and finds the modules, to which hooks may have been added."""
        self._kept.clear()
        parts = (part for part in self.modules if not isinstance(part, fx.GraphModule))
        found = [part for part in parts if calls_other_code(part) and not is_scripted(part)]
        if [*map(id, found)] != [*map(id, self._parts)]:
            self._parts = found
            self._changing.clear()
            self._buffers.clear()

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """In this context the forward of a micro-batch runs."""
        attributes, buffers = [dict(vars(part)) for part in self._parts], self._buffers_now()
        yield
        changed = dict(_changed_attributes(attributes, self._parts))
        now = self._buffers_now()
        for name in buffers.keys() | now.keys():
            before = buffers.get(name)
            if before is not now.get(name):
                changed[name] = _ABSENT if before is None else before
        for name, value in changed.items():
            for earlier in self._kept.values():
                earlier.setdefault(name, value)
        self._changing |= changed.keys()
        self._kept[microbatch] = {name: self._value(name, now) for name in self._changing}

    @contextmanager
    def backward(self, microbatch: int, *, is_last: bool) -> Iterator[None]:
        """In this context a backward of a micro-batch runs; an attribute that it sets itself stays so.

        Args:
            is_last: whether none of it is left to run afterwards.
        """
        kept = self._kept.pop(microbatch, {}) if is_last else self._kept.get(microbatch, {})
        swapped = [one for name, value in kept.items() if (one := self._swapped(name, value))]
        try:
            yield
        finally:
            for put_back in swapped:
                put_back()

    def _buffers_now(self) -> dict[_Name, _Buffer]:
        """Returns the buffers of the parts; each is copied when its value has changed since it was copied last."""
        found = {}
        for number, part in enumerate(self._parts):
            for name, tensor in part._buffers.items():
                if tensor is not None:
                    key, count = _Name(number, name, True), version(tensor)
                    last = self._buffers.get(key)
                    is_same = last is not None and last.tensor is tensor and last.version == count
                    is_copied = tensor.nbytes <= _SMALL_BYTES or key in self._changing or not (is_same or last is None)
                    if last is None or not is_same or (is_copied and last.copy is None):
                        last = _Buffer(tensor, count, tensor.detach().clone() if is_copied else None)
                    found[key] = last
        self._buffers = found
        return found

    def _value(self, name: _Name, buffers: Mapping[_Name, _Buffer]) -> object:
        if name.is_buffer:
            return buffers.get(name, _ABSENT)
        return vars(self._parts[name.part]).get(name.name, _ABSENT)

    def _swapped(self, name: _Name, value: object) -> Callable[[], None] | None:
        """Gives a module the value from a forward, if it has another one; returns what undoes that, None if nothing."""
        part = self._parts[name.part]
        registry: dict[str, object] = part._buffers if name.is_buffer else vars(part)  # type: ignore[assignment]
        now = registry.get(name.name, _ABSENT)
        if isinstance(value, _Buffer):
            value = value.tensor if version(value.tensor) == value.version else value.copy
            if value is None:  # a large buffer, written to for the first time: its value from before is lost
                return None
        if value is now:
            return None
        _set(registry, name.name, value)

        def put_back() -> None:
            if registry.get(name.name, _ABSENT) is value:
                _set(registry, name.name, now)

        return put_back


def _set(registry: dict[str, object], name: str, value: object) -> None:
    if value is _ABSENT:
        registry.pop(name, None)
    else:
        registry[name] = value


def _changed_attributes(before: Iterable[dict[str, object]], parts: list[nn.Module]) -> Iterator[tuple[_Name, object]]:
    """Yields the attributes that refer to other objects than `before`, with what they referred to."""
    for number, (old, part) in enumerate(zip(before, parts, strict=True)):
        new = vars(part)
        if len(old) == len(new) and all(map(is_, old.values(), new.values())):  # nearly always, and ten times as fast
            continue
        for name in old.keys() | new.keys():
            value = old.get(name, _ABSENT)
            if value is not new.get(name, _ABSENT):
                yield _Name(number, name, False), value
