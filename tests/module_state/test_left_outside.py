"""Tensors that forwards leave outside of their module are removed; flags and caches of numbers stay."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bapipe.module_state.left_outside import left_outside
from bapipe.module_state.python_state import state_restored

SEEN: list[object] = ["before"]
BY_NAME: dict[str, object] = {"number": 1}
LAST: Tensor | None = None
IS_REGISTERED = False
TABLE = torch.zeros(2)


class Manager:
    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.num_calls = 0


MANAGER = Manager()


def note(x: Tensor) -> None:
    MANAGER.losses.append(x)
    MANAGER.num_calls += 1


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global LAST, IS_REGISTERED
        SEEN.extend(["a word", (x, 1)])
        BY_NAME.update({"tensor": x, "word": "kept"})
        LAST, IS_REGISTERED = x, True
        note(x)
        return x + TABLE


def plain() -> nn.Module:
    return Leaves()


def parametrized() -> nn.Module:
    module = Leaves()
    module.scale = nn.Parameter(torch.ones(2))
    return parametrize.register_parametrization(module, "scale", nn.ReLU())


@pytest.mark.parametrize("made", [plain, parametrized])
def test_tensors_are_removed_and_all_else_stays(made: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SEEN", ["before"]), ("BY_NAME", {"number": 1}), ("MANAGER", Manager())):
        monkeypatch.setitem(globals(), name, value)
    module = made()
    with left_outside(module) as left:
        assert not left()
        module(torch.ones(2))
        assert {id(owner) for owner in left()} >= {id(SEEN), id(BY_NAME), id(MANAGER.losses)}
    assert SEEN == ["before", "a word"]
    assert BY_NAME == {"number": 1, "word": "kept"}
    assert (MANAGER.losses, MANAGER.num_calls) == ([], 1)
    assert LAST is None
    assert IS_REGISTERED  # what is done once only would be done again


def test_a_module_is_restored_beside_a_table_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "table.npy", np.ones(2, dtype=np.float32))
    table = np.load(tmp_path / "table.npy", mmap_mode="r")
    with pytest.warns(UserWarning, match="not writable"):
        monkeypatch.setitem(globals(), "TABLE", torch.from_numpy(table))  # to write to it would end the process
    module = Leaves()
    with state_restored(module):
        assert module(torch.ones(2)).tolist() == [2.0, 2.0]
