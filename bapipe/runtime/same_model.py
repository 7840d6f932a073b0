"""Whether processes train the same model: each host may have its own copy of the source, and one may be older."""

import ast
import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from bapipe.errors import BapipeError
from bapipe.tracing.model import TracedModel

_log = logging.getLogger(__name__)

_OF_A_PROCESS = re.compile(r"0x[0-9a-f]+|(?<=cuda):\d+|(?<='cuda'), index=\d+")
"""What texts of the same thing differ in: addresses, and the number of a GPU."""

_LIBRARIES = ("torch", "builtins", "bapipe")
"""Their code is not looked at: ranks of a job compare the versions of torch and bapipe."""


def check_same_model(model: TracedModel, loss: Callable[..., object], group: dist.ProcessGroup | None) -> None:
    """Raises BapipeError if processes have other code or layers of a model, or another loss; warns of other settings.

    Every process of the group calls it together. Code is compared without comments and layout, and that of functions
    which a forward calls by what they do to the traced tensors. Settings are numbers and texts that modules keep: those
    of torch's modules count as code, others may be of a process, such as its rank.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    own = (
        {name: _digest(text) for name, text in _parts(model, loss)},
        {name: _digest(text) for name, text in _own_settings(model.root)},
    )
    of_all: list[tuple[dict[str, bytes], dict[str, bytes]]] = [own] * size
    dist.all_gather_object(of_all, own, group=group)
    codes, settings = zip(*of_all, strict=True)
    if unlike := _first_unlike(codes):
        raise BapipeError(
            f"process {unlike[1]} has another version of {unlike[0]} than process 0, so they would train another model "
            "together: give their hosts the same files, and build the model with the same arguments"
        )
    if unlike := _first_unlike(settings):
        _log.warning(
            "process %d has other numbers or texts in the attributes of %s than process 0: build the model with the "
            "same arguments, and give hosts the same files",
            *reversed(unlike),
        )


def _first_unlike(digests: Sequence[dict[str, bytes]]) -> tuple[str, int] | None:
    """Returns the first part of which a process has another digest than the first process, and the process."""
    first = digests[0]
    for process, other in enumerate(digests):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                return name, process
    return None


def _digest(text: str) -> bytes:
    return hashlib.sha256(_OF_A_PROCESS.sub("", text).encode()).digest()[:8]


def _parts(model: TracedModel, loss: Callable[..., object]) -> Iterator[tuple[str, str]]:
    """Yields what may differ, and a text of each."""
    for path, module in model.root.named_modules():
        yield _in_words(path, module), _text_of_module(module)
    lines: dict[str, list[str]] = {layer.name: [layer.kind, *layer.inputs, *layer.outputs] for layer in model.layers}
    for node, name in model.layer_of.items():
        lines[name].append(f"{node.op} {_name_of(node.target)} {node.args} {node.kwargs}")
    for name, of_layer in lines.items():
        yield f"the layer '{name}'", "\n".join(of_layer)
    yield "the loss", "\n".join(_texts_of_callable(loss))


def _own_settings(root: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in root.named_modules():
        if not _is_of_a_library(type(module)):
            yield _in_words(path, module), _settings(module)


def _in_words(path: str, module: nn.Module) -> str:
    return f"the module '{path}'" if path else f"the model ({type(module).__name__})"


def _text_of_module(module: nn.Module) -> str:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}" for name, tensor in tensors]
    settings = _settings(module) if _is_of_a_library(type(module)) else ""
    return "\n".join([_code_of_class(type(module)), settings, *shapes])


def _texts_of_callable(called: Any) -> Iterator[str]:
    if isinstance(called, nn.Module):
        for path, module in called.named_modules():
            yield path + _text_of_module(module) + _settings(module)
    elif isinstance(called, partial):
        yield from _texts_of_callable(called.func)
        yield _plain([*called.args, *called.keywords.items()])
    elif inspect.isfunction(called):
        closure = inspect.getclosurevars(called).nonlocals
        yield _code(called)
        yield _plain([*(called.__defaults__ or ()), *(called.__kwdefaults__ or {}).items(), *sorted(closure.items())])
    elif inspect.ismethod(called):
        yield from _texts_of_callable(called.__func__)
        yield _settings(called.__self__)
    else:
        yield _code_of_class(type(called))
        yield _settings(called)


def _code_of_class(kind: type) -> str:
    return "\n".join(_code(base) for base in kind.__mro__)


@cache
def _code(definition: Any) -> str:
    """Returns the code of a class or a function without comments and layout, its name alone if that is not known."""
    name = _name_of(definition)
    if _is_of_a_library(definition):
        return name
    try:
        file = inspect.getsourcefile(definition)
        found = [] if file is None else _definitions(file).get(name, [])
    except (OSError, TypeError, SyntaxError):  # made by C, or without a file that can be read
        found = []
    return name + "".join(map(ast.dump, found))


@cache
def _definitions(file: str) -> dict[str, list[ast.AST]]:
    """Returns the classes and functions of a file by their qualified names."""
    found: dict[str, list[ast.AST]] = {}

    def add(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(prefix + node.name, []).append(node)
                add(node, f"{prefix}{node.name}." + "<locals>." * (not isinstance(node, ast.ClassDef)))
            else:
                add(node, prefix)

    add(ast.parse(Path(file).read_bytes()), "")
    return found


def _is_of_a_library(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).partition(".")[0] in _LIBRARIES


def _name_of(definition: Any) -> str:
    return str(getattr(definition, "__qualname__", definition))


def _settings(one: object) -> str:
    kept = vars(one) if hasattr(one, "__dict__") else {}
    return _plain([item for item in sorted(kept.items()) if item[0] != "training" and not item[0].startswith("_")])


def _plain(values: list[Any]) -> str:
    """Returns a text of numbers and texts, also of those in tuples and lists; without all else."""
    return "\n".join(repr(value) for value in values if _is_plain(value))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
