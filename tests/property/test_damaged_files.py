"""Damaged files of every kind are read or refused: no traceback, nothing read that a file does not say.

`python -m benchmarks.fuzz` tries many more, with limits on time and memory.
"""

import ast
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given

from benchmarks.fuzz.__main__ import all_kinds, outcome, run_batch
from benchmarks.fuzz.kinds import Kind
from benchmarks.fuzz.mutate import mutated
from tests.sources import FILES, tree_of
from tests.strategies import drawn, examples

NAMES = (
    "profile", "cluster", "plan", "trace", "graph", "table", "argument", "paradl", "sailor-times",
    "sailor-layers", "metis", "group-profile", "shapes", "group-cluster", "group-plan", "manifest", "tensors", "weights", "picture",
    "sentences", "vocabulary", "subwords", "catalogue", "text", "digits", "volume",
)  # fmt: skip


@cache
def known() -> dict[str, Kind]:
    with TemporaryDirectory() as folder:
        return {kind.name: kind for kind in all_kinds(Path(folder))}


def kind_of(name: str) -> Kind:
    return known()[name]


def test_every_kind_is_tried() -> None:
    assert tuple(known()) == NAMES


def test_every_importer_is_tried() -> None:
    kinds = {"paradl": "paradl", "pipedream": "graph", "sailor": "sailor-times", "table": "table"}
    importers = {
        path.stem
        for path in FILES
        if path.parent.name == "importers" and path.name != "__init__.py"
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("parse_", "import_"))
    }
    assert (importers, set(kinds.values()) - set(NAMES)) == (set(kinds), set())


@pytest.mark.parametrize("name", NAMES)
def test_an_intact_file_is_read(name: str, tmp_path: Path) -> None:
    for content in kind_of(name).seeds:
        (tmp_path / "file").write_bytes(content)
        assert outcome(kind_of(name), tmp_path / "file") == "read"


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_read_or_refused(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    kind, path = kind_of(name), tmp_path_factory.mktemp(name) / "file"

    def damaged(random: Random) -> bytes:
        return mutated(random.choice(kind.seeds), random)

    @examples(30)
    @given(drawn(damaged))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        assert outcome(kind, path) in ("read", "refused")

    check()


def test_a_batch_reports_what_became_of_its_files(tmp_path: Path) -> None:
    def use(path: Path) -> None:
        raise KeyError(path.name)

    broken = Kind(name="broken", seeds=(b"{}",), use=use)
    batch = run_batch(broken, range(3), tmp_path)
    assert batch.outcomes == {"failed": 3}
    assert batch.failures[0].startswith("broken 0: traceback: KeyError: 'file' (")
    assert run_batch(kind_of("argument"), range(20), tmp_path).failures == []
