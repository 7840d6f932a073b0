"""No file is unpickled, in the package or while the tests run: a pickle can run any code when it is read."""

import ast
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.nn import Linear

import bapipe
from bapipe.processes import local_processes, receive
from tests import PYTHONPATH
from tests.no_unpickling.probe import try_to_unpickle

PACKAGE = Path(bapipe.__file__).parent

PICKLE_READERS = {"processes.py", "training/checkpoint/old_index.py", "training/launch/worker.py"}
"""The first reads pipes and an unnamed file of its parent, the second imports nothing, the third only writes."""

MAKES_A_FUNCTION = "tracing/bound_inputs.py"
"""It makes one with the names of the arguments that the model's own code has."""

NEVER = {"eval", "exec", "compile", "__import__", "marshal", "shelve", "dill", "joblib", "yaml", "zipfile", "tarfile"}


READERS: dict[str, Callable[[Path], object]] = {
    "pickle.load": lambda path: pickle.load(path.open("rb")),
    "pickle.Unpickler": lambda path: pickle.Unpickler(path.open("rb")).load(),
    "torch.load": lambda path: torch.load(path, weights_only=False),
    "numpy.load": lambda path: numpy.load(path, allow_pickle=True),
    "torch.distributed.checkpoint": lambda path: FileSystemReader(path.parent).read_metadata(),
}


@pytest.mark.parametrize("reader", READERS)
def test_unpickling_a_file_is_impossible_while_the_tests_run(reader: str, tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    if reader == "torch.load":
        with path.open("wb") as file:
            torch.save(Linear(1, 1), file)
    elif reader == "numpy.load":
        with path.open("wb") as file:
            numpy.save(file, numpy.array([Path("x")], dtype=object))
    else:
        path.write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # its class is in a module of no package
        READERS[reader](path)
    assert type(caught.value).__name__ == "UnpickledFile"


def test_pickles_in_memory_are_read() -> None:
    assert pickle.loads(pickle.dumps(Path("x"))) == Path("x")


def test_nor_in_the_processes_that_tests_start(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(Path("x")))
    (tmp_path / "job").mkdir()
    with local_processes(try_to_unpickle, 1, (path,), folder=tmp_path / "job", grace_s=1.0) as processes:
        messages = [message for _, message in receive(processes, 60.0)]
    assert messages == ["UnpickledFile"]
    code = f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True)
    assert "UnpickledFile" in done.stderr


def test_the_package_reads_no_pickle_and_evaluates_nothing() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [str(node.module)]
            assert not {part.partition(".")[0] for part in imported} & NEVER, name
            assert not any(part.startswith("torch.distributed.checkpoint") for part in imported), name
            assert "pickle" not in imported or name in PICKLE_READERS, name
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in NEVER or name == MAKES_A_FUNCTION, name
                if ast.unparse(node.func) == "torch.load":
                    assert "weights_only=True" in ast.unparse(node), name
                assert "allow_pickle" not in ast.unparse(node), name
