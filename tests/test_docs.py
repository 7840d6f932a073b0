"""The documentation builds without a warning, and every file and link that it names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

ROOT = ROOT
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
