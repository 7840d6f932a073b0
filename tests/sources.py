"""The package's own source files, each read and parsed once."""

import ast
from functools import cache
from pathlib import Path

from tests import ROOT

PACKAGE = ROOT / "bapipe"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns every node of a file's tree, breadth first."""
    return tuple(ast.walk(tree_of(path)))


@cache
def calls_of(path: Path) -> tuple[tuple[str, ast.Call], ...]:
    """Returns (what is called, as it is written) and the call of every call in a file."""
    return tuple((ast.unparse(node.func), node) for node in nodes_of(path) if isinstance(node, ast.Call))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))
