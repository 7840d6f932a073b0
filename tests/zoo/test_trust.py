"""A factory that a plan names is imported only if it cannot do harm, or if the user has named it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import bapipe
from bapipe.errors import InvalidModel
from bapipe.zoo import ZOO, resolve
from bapipe.zoo.trust import check_trusted, is_of_zoo
from tests.builders import chain, devices

OWN = """
import os
from functools import partial
from os import system
from bapipe.zoo.vgg import vgg16 as net

def own(width=3):
    return width

class Kind:
    pass

half = partial(own, width=2)
call = partial(os.system, "true")
deep = partial(call)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a module, a package, and a virtual environment with another module."""
    (tmp_path / "own_trusted.py").write_text(OWN)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "part.py").write_text("def made(): ...\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed_there.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "torch").mkdir()  # the installed package comes before a folder without an __init__.py
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / ".venv")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "factory",
    [
        *sorted(ZOO.values()), resolve("hf:GPT2LMHeadModel"), "own_trusted:own", "own_trusted:half", "own_trusted:Kind",
        "own_trusted:net", "own_package.part:made",
    ],
)  # fmt: skip
def test_factories_of_the_zoo_and_of_the_current_folder_are_trusted(here: Path, factory: str) -> None:
    check_trusted(factory, None)
    with pytest.raises(InvalidModel) as caught:
        check_trusted(factory, "own_trusted:another")
    assert str(caught.value) == (
        f"`trust_factory` own_trusted:another is not the plan's factory, which is '{factory}': leave it out, or name "
        "that one if you trust the plan"
    )


@pytest.mark.parametrize(
    "factory",
    [
        "os:system", "posix:system", "subprocess:run", "torch:load", "torch.serialization:load", "builtins:exec",
        "bapipe.zoo.factory:find", "bapipe.zoo.vgg:nn", "bapipe.zoo.hugging_face:_model", "bapipe.training.run:export",
        "own_trusted:system", "own_trusted:call", "own_trusted:deep", "installed_there:f", "__main__:f", "sys:exit",
    ],
)  # fmt: skip
def test_any_other_factory_is_refused_with_what_allows_it(here: Path, factory: str) -> None:
    before = set(sys.modules)
    with pytest.raises(InvalidModel) as caught:
        check_trusted(factory, None)
    assert str(caught.value) == (
        f"the plan's factory '{factory}' is neither of the zoo nor a function of a module in the current folder, and "
        f"calling it may do anything: if you trust the plan, `trust_factory` {factory}"
    )
    assert "installed_there" not in set(sys.modules) - before
    check_trusted(factory, factory)


def test_a_factory_that_is_not_there_is_said_to_be_missing(here: Path) -> None:
    with pytest.raises(InvalidModel, match=r"^no module 'nowhere' for factory 'nowhere:f'"):
        check_trusted("nowhere:f", None)
    with pytest.raises(InvalidModel, match=r"^module 'own_trusted' has no function 'owm'; did you mean 'own'\?$"):
        check_trusted("own_trusted:owm", None)


def test_a_module_of_the_same_name_from_elsewhere_is_not_the_folder_s(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trusted("own_trusted:own", None)
    other = tmp_path_factory.mktemp("other")
    (other / "own_trusted.py").write_text(OWN)
    monkeypatch.chdir(other)
    with pytest.raises(InvalidModel, match=r"is neither of the zoo nor "):
        check_trusted("own_trusted:own", None)


def test_names_of_the_zoo() -> None:
    assert all(is_of_zoo(factory) for factory in ZOO.values())
    assert is_of_zoo("bapipe.zoo.hugging_face:BertForMaskedLM")
    assert not is_of_zoo("bapipe.zoo.hugging_face:__class__")
    assert not is_of_zoo("bapipe.zoo.vgg:system")


def test_a_run_refuses_a_plan_before_it_imports_the_factory(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    plan = bapipe.plan(chain([1, 1]), devices(2), minibatch_size=4)
    plan = msgspec.structs.replace(plan, factory="os:system", arguments={"command": f"touch {sign}"})
    with pytest.raises(InvalidModel, match=r"^the plan's factory 'os:system' is neither "):
        bapipe.run(plan)
    assert not sign.exists()
