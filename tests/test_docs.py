"""The documentation builds without a warning, and every file and link that it names exists."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from bapipe.planner.compute.pace import ACTIONS_PER_S
from bapipe.planner.inputs.options import SEARCH
from bapipe.schedules import ALL
from bapipe.zoo import ZOO
from tests import ROOT
from tests.sources import FILES, PACKAGE, nodes_of, relative, tree_of

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("*/README.md")),
]
LINK = re.compile(r"\[[^\]]*\]\((?!https?://)([^)#\s]+)[^)]*\)")
CODE = re.compile(r"`([\w./-]+/[\w./-]*|[\w-]+\.py)`")
NOT_FILES = re.compile(r"(profile|cluster|plan|checkpoint)/\d|locale/.*|.*/x\.py|x\.py")
"""Format versions, and the names of files that a reader is to write."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_source_files_exist(page: Path) -> None:
    """A path in backticks is one from the root or from `bapipe/`; a bare file name is that of some file."""
    names = {path.name for path in ROOT.glob("[a-z]*/**/*.py")}
    missing = []
    for text in CODE.findall(page.read_text()):
        if NOT_FILES.fullmatch(text) or text.startswith(("~", "/")):
            continue
        folders = (ROOT, ROOT / "bapipe", ROOT / "bapipe" / "planner", ROOT / "bapipe" / "training", page.parent)
        if "/" in text and not any((folder / text).exists() for folder in folders):
            missing.append(text)
        if "/" not in text and text not in names:
            missing.append(text)
    assert missing == []


MODULES = {
    ("bapipe", *path.relative_to(PACKAGE).with_suffix("").parts[: -1 if path.name == "__init__.py" else None]): path
    for path in FILES
}
"""The file of each module, by the parts of its name."""

DOTTED = re.compile(r"`(\w+(?:\.\w+)+)(?:\(.*?\))?`")


@cache
def names_in(path: Path) -> set[str]:
    """Returns the names that a file binds or imports, those of attributes too; of a package also its modules."""
    named = {
        "FunctionDef": "name",
        "ClassDef": "name",
        "alias": "name",
        "arg": "arg",
        "Name": "id",
        "Attribute": "attr",
    }
    found = {str(getattr(node, named[kind])) for node in nodes_of(path) if (kind := type(node).__name__) in named}
    return found | ({inner.stem for inner in path.parent.iterdir()} if path.name == "__init__.py" else set())


def exists(dotted: str) -> bool:
    """Whether a name such as `plan.plan_once` or `bapipe.planner.plan` is one of ours, or begins with no module of ours."""
    parts = tuple(dotted.split("."))
    if parts[-1] in ("json", "py", "txt", "toml") or parts[0] == "environment":  # a file, or an entry of a profile
        return True
    for length in range(len(parts), 0, -1):
        begun = [path for name, path in MODULES.items() if name[-length:] == parts[:length]]
        if begun:
            return length == len(parts) or any(parts[length] in names_in(path) for path in begun)
    return True


@pytest.mark.parametrize("path", [*PAGES, *FILES], ids=lambda path: str(path.relative_to(ROOT)))
def test_named_functions_exist(path: Path) -> None:
    """A dotted name in backticks that begins with a module of ours, in docs, docstrings and comments."""
    assert [name for name in DOTTED.findall(path.read_text()) if not exists(name)] == []


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=relative)
def test_a_package_names_modules_that_it_has(path: Path) -> None:
    """A bare word in backticks is one of its files or folders, or a name in one of them."""
    inside = {name for inner in path.parent.rglob("*.py") for name in {inner.stem, inner.parent.stem} | names_in(inner)}
    words = re.findall(r"`([a-z_]+)(?:\.py|/)?`", ast.get_docstring(tree_of(path)) or "")
    assert set(words) - inside == set()


def test_the_calls_that_the_planner_shows_are_functions_of_it() -> None:
    text = ast.get_docstring(tree_of(PACKAGE / "planner" / "__init__.py")) or ""
    shown = text.split("each within the one above it:")[1].split("Folders")[0].split("\n")
    names = [line.split()[0] for line in shown if line.strip()]
    functions = {
        node.name
        for path in FILES
        if "planner" in path.parts
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(names) > 10
    assert [name for name in names if name.split(".")[-1] not in functions] == []


def first_column(page: str) -> list[str]:
    """Returns the names in backticks in the first column of a page's tables, in order."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    return re.findall(r"`([^`]+)`", "".join(rows))


def test_every_schedule_and_model_is_described_once() -> None:
    assert sorted(first_column("schedules.md")) == sorted([*ALL, SEARCH])
    assert sorted(first_column("data.md")) == sorted(ZOO)


def test_the_page_of_the_search_has_the_pace_that_is_assumed_at_first() -> None:
    text = " ".join((ROOT / "docs" / "algorithm.md").read_text().split())
    assert f"by the pace of the largest plan so far, at first {ACTIONS_PER_S:,} actions a second" in text


def test_the_plan_of_the_readme_is_what_the_command_prints(tmp_path: Path) -> None:
    """Every line of the first example but the dots, in order; its calls to the text below it are left out."""
    block = (ROOT / "README.md").read_text().split("\n$ bapipe ")[1].split("```")[0]
    command, *lines = [re.sub(r" +\(\d\)$", "", line).rstrip() for line in block.splitlines()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "90", "XDG_CACHE_HOME": str(tmp_path)}
    words = [sys.executable, "-m", "bapipe", *command.split(), "-o", str(tmp_path / "plan.json")]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    printed = iter(line.rstrip() for line in done.stdout.splitlines())
    for line in lines:
        assert line == "..." or any(line == other for other in printed), line


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_fault_names_a_test_that_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), flags=re.MULTILINE)
    }
    assert len(named) > 20
    assert named - known == set()


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "algorithm.html").exists()
    assert "the maximum norm of all gradients" in (tmp_path / "api.html").read_text()  # an argument of a constructor
