"""What code keeps is put back after a call, where all of it can be found."""

import importlib
import logging
from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.module_state import reached_state
from bapipe.module_state.python_state import state_restored

KeptState = partial(reached_state.KeptState, module_restored=state_restored)
CLASSES = 4
NOTED: list[float] = []
SETTINGS, OPTIONS, MANY = Namespace(smoothing=0.1), {"smoothing": 0.1}, {i: Namespace() for i in range(1001)}
LOG, FILE = logging.getLogger("tests.losses"), StringIO()
calls = 0


def plain(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.view(-1, CLASSES), target)


def noting(scores: Tensor, target: Tensor) -> Tensor:
    NOTED.append(0.0)
    return plain(scores, target)


def through_another(scores: Tensor, target: Tensor) -> Tensor:
    return noting(scores, target)


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.values.append(value)


class Trainer:
    num_steps = 0
    file: object = None
    must_stop = False

    def step(self) -> None:
        self.count()

    def count(self) -> None:
        self.num_steps += 1

    def loss(self, scores: Tensor, target: Tensor) -> Tensor:
        return plain(scores, target)


class Own(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.other(scores, target)

    def other(self, scores: Tensor, target: Tensor) -> Tensor:
        return plain(scores, target)


class Noting(Own):
    def other(self, scores: Tensor, target: Tensor) -> Tensor:
        return noting(scores, target)


@pytest.mark.parametrize(
    ("code", "is_known"),
    [
        (functional.cross_entropy, True),
        (nn.CrossEntropyLoss(torch.ones(4)), True),
        (plain, True),
        (partial(plain, target=torch.zeros(2)), True),
        (lambda scores, target: nn.CrossEntropyLoss()(scores, target), True),
        (noting, True),
        (through_another, True),
        (Trainer().loss, True),
        (lambda: SETTINGS.smoothing + OPTIONS["smoothing"], True),
        (lambda: LOG.debug("loss"), True),
        (lambda: FILE.write("loss"), False),
        (lambda: MANY.get(1), False),
        (Own([1, 2]), True),
        (Own([1, 2]).other, True),
        (Own(torch.ones(())), True),
        (Own(torch.ones(50_000)), True),
        (Own(dict.fromkeys(range(2000))), False),
        (nn.Sequential(Own(None), nn.Linear(4096, 4096)), False),
        (Noting(None), True),
    ],
)
def test_code_that_reaches_other_objects_is_not_known(code: Callable[..., object], is_known: bool) -> None:
    assert (KeptState(code).obstacle is None) == is_known


@pytest.mark.parametrize(
    ("folder", "obstacle"),
    [("site-packages", None), ("dist-packages", None), ("mine", "an object of type lock")],
)
def test_modules_that_pip_has_installed_are_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, obstacle: str | None
) -> None:
    """Debian's Python, and containers made of it, have them in a folder of another name."""
    (tmp_path / folder).mkdir()
    name = f"scaling_in_{folder[:4]}"
    (tmp_path / folder / f"{name}.py").write_text(
        "import threading\n\nLOCK = threading.Lock()\n\ndef scale():\n    with LOCK:\n        return 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path / folder)
    scaling = importlib.import_module(name)
    assert KeptState(lambda: scaling.scale() * 2).obstacle == obstacle


def test_an_obstacle_is_named() -> None:
    assert KeptState(lambda: FILE.write("loss")).obstacle == "an object of type StringIO"
    assert KeptState(lambda: MANY.get(1)).obstacle == "more than 1,000 objects"


def test_numbers_and_modules_are_put_back() -> None:
    inner, own = 0, Own([])

    def counting() -> None:
        nonlocal inner
        global calls
        inner += 1
        calls += 1
        own.kept.append(1)

    state = KeptState(counting)
    assert state.obstacle is None
    with state.restored():
        counting()
        assert (inner, calls, own.kept) == (1, 1, [1])
    assert (inner, calls, own.kept) == (0, 0, [])


def test_collections_and_objects_are_put_back(caplog: pytest.LogCaptureFixture) -> None:
    terms, seen, figures, meter, trainer = [1.0], {1}, {"a": 1}, Meter(), Trainer()

    def noting_all() -> None:
        terms.append(2.0)
        seen.add(2)
        figures["b"] = 2
        meter.update(3.0)
        trainer.step()
        LOG.warning("noted")

    def now() -> tuple[object, ...]:
        return terms, seen, figures, meter.values, trainer.num_steps

    state = KeptState(noting_all)
    assert state.obstacle is None
    with state.restored():
        noting_all()
        assert now() == ([1.0, 2.0], {1, 2}, {"a": 1, "b": 2}, [3.0], 1)
    assert now() == ([1.0], {1}, {"a": 1}, [], 0)
    assert not caplog.messages
    LOG.warning("again")
    assert caplog.messages == ["again"]


@pytest.mark.parametrize("code_of", [lambda trainer: trainer.step, lambda trainer: lambda: trainer.step()])
def test_what_code_does_not_name_is_left_alone(code_of: Callable[[Trainer], Callable[[], None]]) -> None:
    trainer = Trainer()
    trainer.file = FILE
    code = code_of(trainer)
    state = KeptState(code)
    assert state.obstacle is None
    with state.restored():
        code()
        trainer.must_stop = True  # as the handler of a signal sets
    assert trainer.num_steps == 0
    assert trainer.must_stop


def test_tensors_and_arrays_are_put_back() -> None:
    seen, array, last = torch.zeros(2), np.zeros(2), deque([1], maxlen=1)

    def counting() -> None:
        seen.add_(1)
        array[0] += 1
        last.append(2)

    state = KeptState(counting)
    assert state.obstacle is None
    with state.restored():
        counting()
        assert (seen.tolist(), array.tolist(), list(last)) == ([1, 1], [1, 0], [2])
    assert (seen.tolist(), array.tolist(), list(last)) == ([0, 0], [0, 0], [1])


class Counting:
    """Counts in a number of its class, in a property and in a static method."""

    num_calls = 0
    log: ClassVar[list[int]] = []

    @property
    def next(self) -> int:
        Counting.num_calls += 1
        return self.num_calls

    @staticmethod
    def note(value: int) -> None:
        Counting.log.append(value)


def test_classes_and_what_they_run_are_put_back() -> None:
    counting = Counting()
    state = KeptState(lambda: counting.note(counting.next))
    assert state.obstacle is None
    with state.restored():
        counting.note(counting.next)
        assert (Counting.num_calls, Counting.log) == (1, [1])
    assert (Counting.num_calls, Counting.log) == (0, [])


def test_collections_of_python_s_own_and_frozen_ones() -> None:
    class Frozen(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            raise TypeError("frozen")

        clear = update = copy = __setitem__  # type: ignore[assignment]

    notes, frozen = UserDict({"n": 0}), Frozen(a=1)

    def code() -> None:
        notes["n"] += frozen["a"]

    state = KeptState(code)
    assert state.obstacle is None
    with state.restored():
        code()
    assert (dict(notes), dict(frozen)) == ({"n": 0}, {"a": 1})


def test_attributes_of_functions_and_hooks_are_put_back() -> None:
    calls: list[int] = []
    criterion = nn.CrossEntropyLoss()
    criterion.register_forward_hook(lambda *_: calls.append(1))

    def counting() -> None:
        counting.calls += 1  # type: ignore[attr-defined]
        criterion(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))

    counting.calls = 0  # type: ignore[attr-defined]
    state = KeptState(counting)
    assert state.obstacle is None
    with state.restored():
        counting()
        assert (counting.calls, calls) == (1, [1])  # type: ignore[attr-defined]
    assert (counting.calls, calls) == (0, [])  # type: ignore[attr-defined]


def test_arrays_of_all_kinds() -> None:
    number, many = np.zeros(()), {i: torch.zeros(()) for i in range(1200)}

    def counting() -> None:
        number[...] += 1
        many[1100].add_(1)

    state = KeptState(counting)
    assert state.obstacle is None
    with state.restored():
        counting()
    assert number == 0
    assert state.obstacle == "a tensor of shape () that it changes"
    generator, objects = np.random.default_rng(0), np.array([None])
    assert KeptState(lambda: generator.random()).obstacle == "an object of type Generator"
    assert KeptState(lambda: objects).obstacle == "an array of shape (1,), which holds much, or objects"
    assert KeptState(lambda: np.exp(np.float32(2)) + np.sum([1])).obstacle is None


def test_deep_objects_are_an_obstacle() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert KeptState(lambda: deep).obstacle == "more than 1,000 objects"

    def around(function: Callable[[], int]) -> Callable[[], int]:
        return lambda: function()

    function: Callable[[], int] = int
    for _ in range(5000):
        function = around(function)
    assert KeptState(function).obstacle == "objects that are nested too deep to be followed"


ENTRIES, BEHIND, TALLY = [{"calls": 0} for _ in range(1500)], [0], Namespace(calls=0, more=Namespace(calls=0))


def test_what_code_names_behind_a_large_collection_is_put_back() -> None:
    def counting() -> None:
        ENTRIES[0]["calls"] += 1
        BEHIND[0] += 1
        TALLY.calls += 1
        TALLY.more.calls += 1

    state = KeptState(counting)
    with state.restored():
        counting()
        assert (BEHIND, TALLY.calls, TALLY.more.calls) == ([1], 1, 1)
    assert (ENTRIES[0]["calls"], BEHIND, TALLY.calls, TALLY.more.calls) == (0, [0], 0, 0)
    assert state.obstacle == "more than 1,000 objects"


class Averaging:
    def __init__(self) -> None:
        self.mean = torch.ones(())

    def __call__(self) -> None:
        self.mean.mul_(0.9)


def test_an_object_that_is_called_is_put_back() -> None:
    code = Averaging()
    state = KeptState(code)
    with state.restored():
        code()
        assert code.mean < 1
    assert code.mean == 1


def test_a_list_of_figures_may_be_long() -> None:
    noted = [torch.zeros(()) for _ in range(1200)]
    state = KeptState(lambda: noted.append(torch.zeros(())))
    assert state.obstacle is None
    with state.restored():
        noted.append(torch.ones(()))
    assert len(noted) == 1200


def test_what_makes_an_object_is_not_followed() -> None:
    class Owner:
        def __init__(self) -> None:
            self.file, self.num_steps = FILE, 0

        def loss(self) -> None:
            self.num_steps += 1

    assert KeptState(Owner().loss).obstacle is None


def test_writes_that_torch_does_not_count_and_tensors_without_strides() -> None:
    mean, sparse = torch.ones(()), torch.eye(2).to_sparse()
    count = mean._version

    def code() -> Tensor:
        mean.data.mul_(0.9)
        return sparse

    state = KeptState(code)
    assert state.obstacle is None
    with state.restored():
        code()
    assert (mean.item(), mean._version) == (1, count)


class Secretive:
    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("not bound")


def test_an_object_that_cannot_be_looked_at_is_an_obstacle() -> None:
    secret = Secretive()
    assert KeptState(lambda: secret).obstacle == "an object of type Secretive, which cannot be looked at"


def test_a_large_tensor_that_changes_is_an_obstacle() -> None:
    large = torch.zeros(2**22 + 1)
    state = KeptState(lambda: large.add_(1))
    with state.restored():
        assert state.obstacle is None
    assert state.obstacle is None
    with state.restored():
        large.add_(1)
    assert state.obstacle == "a tensor of shape (4194305,) that it changes"
