"""Conventions of every file: docstrings, comments, and the only place for flags."""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import bapipe
from bapipe.cli import app
from tests import ROOT
from tests.builders import chain, devices
from tests.sources import FILES, PACKAGE, calls_of, nodes_of, relative, text_of, tree_of

FLAG = re.compile(r"(?<![\w-])--[a-z]")

MIN_COMMENTS = {
    "": 5,
    "action_order": 30,
    "analysis": 23,
    "branch_and_bound": 40,
    "compute": 0,
    "device_line": 5,
    "fixed_placements": 5,
    "inputs": 1,
    "long_chain": 30,
    "results": 5,
    "stages": 30,
    "throughput": 30,
}
"""Whole-line comments per 1,000 lines of each folder of the planner, "" its own; to be raised, never lowered."""


NAMES_EACH_FILE = (
    "equivalence",
    "explorer",
    "graph",
    "module_state",
    "planner/action_order",
    "planner/device_line",
    "planner/fixed_placements",
    "planner/inputs",
    "planner/long_chain",
    "planner/stages",
    "tracing",
    "training",
    "training/evaluate",
)
"""Packages whose docstring names each of their files; to be extended, never shortened."""


def docstrings(path: Path) -> set[int]:
    """Returns the ids of the nodes of strings that stand alone: docstrings of modules, classes, functions, attributes."""
    return {
        id(statement.value)
        for node in nodes_of(path)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
    }


def strings(path: Path) -> Iterator[str]:
    """Yields the strings of a file, parts of f-strings included, docstrings excluded."""
    skipped = docstrings(path)
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def test_types_of_arrays_have_one_name_each_in_the_planner() -> None:
    found = [
        (ast.unparse(node.targets[0]), ast.unparse(node.value))
        for path in FILES
        if path.is_relative_to(PACKAGE / "planner")
        for node in nodes_of(path)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("NDArray[np.")
    ]
    assert found
    assert max(Counter(name for name, _ in found).values()) == max(Counter(kind for _, kind in found).values()) == 1


@pytest.mark.parametrize("package", NAMES_EACH_FILE)
def test_the_docstring_of_a_package_names_each_of_its_files(package: str) -> None:
    docstring = ast.get_docstring(tree_of(PACKAGE / package / "__init__.py")) or ""
    names = {path.stem for path in (PACKAGE / package).glob("*.py")} - {"__init__"}
    assert {name for name in names if not re.search(rf"\b{name}\b", docstring)} == set()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_module_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(tree_of(path))
    assert docstring
    assert path.name != "__init__.py" or len(docstring) > 40, "say what the package holds"


OTHER_TOOLS = ("pip install", "nvidia-smi")
"""Whose options are not bapipe's."""


def test_only_the_command_line_names_flags() -> None:
    files = {
        relative(path)
        for path in FILES
        if any(FLAG.search(text) and not any(tool in text for tool in OTHER_TOOLS) for text in strings(path))
    }
    assert [name for name in sorted(files) if not name.startswith("cli/")] == []


def test_every_folder_of_the_planner_has_its_comments_counted() -> None:
    planner = PACKAGE / "planner"
    folders = {path.parent.relative_to(planner) for path in FILES if path.is_relative_to(planner)}
    assert folders == {Path(folder) for folder in MIN_COMMENTS}


@pytest.mark.parametrize("folder", MIN_COMMENTS)
def test_the_planner_is_commented(folder: str) -> None:
    paths = (PACKAGE / "planner" / folder).glob("*.py")
    lines = [line.strip() for path in paths for line in path.read_text().splitlines() if line.strip()]
    num_comments = sum(line.startswith("#") for line in lines)
    assert num_comments * 1000 >= MIN_COMMENTS[folder] * len(lines), f"{num_comments} comments"


def test_json_of_others_is_read_in_one_place() -> None:
    """Within limits, with the errors of a file, and without keys that come twice."""
    found = {relative(path) for path in FILES if re.search(r"\bjson\.loads?\b", text_of(path))}
    assert found == {"formats/strict_json.py"}


def test_no_function_hides_a_module() -> None:
    assert [name for name in bapipe.__all__ if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()] == []


def test_the_actions_of_a_plan_are_parsed_once() -> None:
    plan = bapipe.plan(chain([1, 1]), devices(2), minibatch_size=4)
    assert plan.table is plan.table


def test_the_ranks_of_a_cluster_are_numbered_once_which_neither_its_hash_nor_equality_shows() -> None:
    cluster = devices(3)
    assert cluster.index is cluster.index
    assert cluster.index == {"d0": 0, "d1": 1, "d2": 2}
    assert (cluster, hash(cluster)) == (devices(3), hash(devices(3)))


def test_the_certificate_of_a_throughput_plan_names_its_space() -> None:
    plan = bapipe.plan(chain([1, 2]), devices(2), minibatch_size=4, objective="throughput")
    assert plan.certificate.space


def test_no_certificate_takes_its_bound_from_the_plan_alone() -> None:
    """A certificate whose bound is the plan's own value would call every plan proven optimal."""
    calls = [call for path in FILES for called, call in calls_of(path) if called in ("certify", "Certificate")]
    assert len(calls) >= 3
    for call in calls:
        step, bound, space, *_ = call.args if call.args else (keyword.value for keyword in call.keywords)
        assert ast.unparse(step) != ast.unparse(bound), ast.unparse(call)
        assert not isinstance(space, ast.Constant), ast.unparse(call)


def test_every_function_and_class_of_a_module_is_used() -> None:
    """A name that occurs only in its definition is dead; tests and benchmarks do not count as users."""
    uses = Counter(re.findall(r"\w+", "\n".join(text_of(path) for path in [*FILES, ROOT / "pyproject.toml"])))
    dead = [
        f"{relative(path)}: {node.name}"
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("__")
        if uses[node.name] == 1
    ]
    assert dead == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "formats" / "schemas").glob("*.json")), ids=lambda path: path.name)
def test_descriptions_of_a_schema_are_prose(path: Path) -> None:
    def descriptions(tree: Any) -> Iterator[str]:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if key == "description" and isinstance(value, str):
                yield value
            elif isinstance(value, dict | list):
                yield from descriptions(value)

    for description in descriptions(json.loads(path.read_text())):
        assert not re.search(r"Raises:|Args:|Returns:|Attributes:|\n\s", description)


def test_every_option_has_a_sentence_of_help() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        for parameter in command.params:
            text = getattr(parameter, "help", None)
            if text is None or not parameter.opts[0].startswith("-"):  # arguments are described by their values
                continue
            assert re.fullmatch(r"[A-Z0-9`'(].*[.)]", text.strip(), flags=re.S), f"{name} {parameter.opts}: {text}"


def test_no_two_parts_of_the_planner_have_one_name() -> None:
    """Public classes and functions at the top of its modules: one word for one thing."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        if path.is_relative_to(PACKAGE / "planner"):
            for node in tree_of(path).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(relative(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_public_constant_has_one_place() -> None:
    """Two modules with an equal constant of one name state one rule twice, or should name two rules differently."""
    places: dict[tuple[str, str], list[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp | ast.UnaryOp):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_"):
                        places.setdefault((target.id, ast.unparse(node.value)), []).append(relative(path))
    assert [(name, files) for (name, _), files in places.items() if len(files) > 1] == []
