"""Which modules the patterns of `leaf_modules` match, and which patterns match some modules."""

import fnmatch
import re
from collections.abc import Sequence

from torch import nn

from bapipe.errors import InvalidModel


def matching_paths(module: nn.Module, leaf_modules: Sequence[str]) -> list[str]:
    """Returns the paths of the modules that patterns match; raises InvalidModel if one matches none."""
    paths = [path for path, _ in module.named_modules() if path]
    matches: list[str] = []
    for pattern in leaf_modules:
        matching = fnmatch.filter(paths, pattern)
        if not matching:
            raise InvalidModel(f"{type(module).__name__} has no module '{pattern}' to take as one layer")
        matches += matching
    return list(dict.fromkeys(matches))


def patterns_of(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Returns `leaf_modules` that match these paths and no other: with `*` for numbers, or else the paths."""
    patterns: dict[str, None] = {}
    for path in paths:
        pattern = re.sub(r"\b\d+\b", "*", path)
        patterns[pattern if set(paths).issuperset(matching_paths(module, [pattern])) else path] = None
    return list(patterns)
