"""Every module of the package, every benchmark and every example can be imported."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from tests import ROOT

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if "init_process_group" not in path.read_text())
"""Examples that define a model; one that trains as a script runs under torchrun only."""


def module_names(package: str) -> list[str]:
    """Returns the dotted names of a package's modules; a module that does its work when imported is left out."""
    paths = sorted((ROOT / package).rglob("*.py"))
    relative = [path.relative_to(ROOT).with_suffix("") for path in paths if _is_importable(path)]
    return [".".join(path.parts).removesuffix(".__init__") for path in relative]


def _is_importable(path: Path) -> bool:
    return path.name != "__main__.py" or 'if __name__ == "__main__"' in path.read_text()


@pytest.mark.parametrize("name", [*module_names("bapipe"), *module_names("benchmarks")])
def test_the_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_example_can_be_imported(path: Path) -> None:
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_folder_of_modules_is_found() -> None:
    assert len(module_names("bapipe")) > 150
    assert len(module_names("benchmarks")) > 15
    assert len(EXAMPLES) >= 2
