"""What `--data` names, and that a rank loads no more of it than its stages use."""

import errno
import math
import multiprocessing.synchronize
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.module_state.python_random import global_generator_states
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.data import loader
from bapipe.training.data.loader import HELD_OUT, batches, warn_if_items_change
from bapipe.training.data.workers import num_data_workers
from bapipe.zoo.data.dataset import DatasetSubset, as_pipeline_dataset
from bapipe.zoo.data.open_dataset import open_data, open_dataset
from tests import PYTHONPATH
from tests.models.loading import rank_parts

OWN = "own:factory"


@dataclass(frozen=True)
class Watched(Dataset[Any]):
    """Item i is ((10 i, 10 i + 1), 10 i + 2); notes what is loaded."""

    loaded: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a whole item")

    def part(self, index: int, place: int) -> Tensor:
        self.loaded.append((index, place))
        return torch.tensor(10 * index + place)


@pytest.mark.parametrize(
    ("needs", "needs_target", "microbatches", "places", "rows"),
    [
        (("left",), False, (0, 1), {0}, 4),  # a first stage
        (("right",), True, (0, 1), {1, 2}, 4),  # a last stage that loads an input as well
        ((), True, (0, 1), {2}, 4),  # a last stage
        ((), False, (0, 1), set(), 0),  # one between
        (("left", "right"), True, (0, 1), {0, 1, 2}, 4),  # all in one
        (("left",), False, (1,), {0}, 2),  # a replica of a first stage
    ],
)
def test_a_rank_loads_only_the_parts_that_it_uses(
    needs: tuple[str, ...], needs_target: bool, microbatches: tuple[int, ...], places: set[int], rows: int
) -> None:
    asked = rank_parts(*needs, target=needs_target, microbatches=microbatches)
    data = Watched()
    batch = next(batches(asked, as_pipeline_dataset(data), Position()))
    assert len(data.loaded) == rows * len(places)
    assert {place for _, place in data.loaded} == places
    own = [row for m in microbatches for row in (2 * m, 2 * m + 1)]
    found = {0: batch.inputs[0], 1: batch.inputs[1], 2: batch.target}
    assert {place for place, tensor in found.items() if tensor is not None} == places
    items = as_pipeline_dataset(Items(9))
    both = next(batches(rank_parts("left", "right", target=True), items, Position()))
    expected = {0: both.inputs[0], 1: both.inputs[1], 2: both.target}
    for place in places:
        one, other = found[place], expected[place]
        assert one is not None
        assert other is not None
        assert torch.equal(one[own], other[own])


def test_a_rank_without_samples_in_a_smaller_batch_gets_tensors_of_the_right_shape() -> None:
    left, right, target = (torch.tensor([10 * i + place for i in (3, 4)]) for place in range(3))
    items = as_pipeline_dataset(Items(9))
    (first, _), last = rank_parts("left", target=True, microbatches=(0,)).load(items, (3, 4), HELD_OUT)
    assert first is not None
    assert last is not None
    assert (first.tolist(), last.tolist()) == (left.tolist(), target.tolist())
    (_, unused), none = rank_parts("right", target=True, microbatches=(1,)).load(items, (3, 4), HELD_OUT)
    assert unused is not None
    assert none is not None
    assert (unused.shape, unused.dtype) == (right.shape, right.dtype)
    assert (none.shape, none.dtype) == (target.shape, target.dtype)


class Items(list[Any]):
    """The same items as complete tuples, as a user's data set returns them."""

    def __init__(self, count: int) -> None:
        super().__init__(((torch.tensor(10 * i), 10 * i + 1), torch.tensor(10 * i + 2)) for i in range(count))


def test_data_of_another_number_of_inputs_is_refused() -> None:
    asked = rank_parts("only", input_names=("only",))
    with pytest.raises(BapipeError, match=r"^the model takes 1 inputs; the data gives 2 inputs per sample$"):
        next(batches(asked, as_pipeline_dataset(Items(9)), Position()))


class Noisy(Items):
    """Items with noise from the global generators, and one that cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 8:
            raise BapipeError("item 8 cannot be read")
        noise = torch.rand(()) + random.random() + numpy.random.rand()
        return (torch.tensor(10.0 * index) + noise, noise), noise


def test_worker_processes_change_no_result() -> None:
    asked = rank_parts("left", target=True)
    data = as_pipeline_dataset(Noisy(8))
    start, runs = Position(step=3, epoch=1, offset=4), []
    for num_workers in (0, 2):
        with closing(batches(asked, data, start, num_workers=num_workers)) as loader:
            loaded = [next(loader) for _ in range(4)]
        runs.append([(_numbers(batch.inputs[0]), _numbers(batch.target), batch.after) for batch in loaded])
    assert runs[0] == runs[1]
    assert torch.utils.data.get_worker_info() is None


def _numbers(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    numbers: list[float] = tensor.tolist()
    return numbers


class NoisyParts(Noisy):
    """The same items, whose parts can be loaded separately."""

    def part(self, index: int, place: int) -> Any:
        inputs, target = self[index]
        return (*inputs, target)[place]


class NoisyEpochs(Noisy):
    """Items with noise that is drawn for the whole epoch."""

    noise = 0.0

    def at_epoch(self, epoch: int) -> "NoisyEpochs":
        own = NoisyEpochs(len(self))
        own.noise = random.random() + numpy.random.rand() + torch.rand(()).item()
        return own

    def __getitem__(self, index: Any) -> Any:
        return (torch.tensor(10.0 * index) + self.noise, self.noise), self.noise


@pytest.mark.parametrize("kind", [Noisy, NoisyParts, NoisyEpochs])
def test_ranks_that_load_parts_of_an_item_load_them_of_one_draw(kind: Callable[[int], Any]) -> None:
    """The first stage, a last one with two replicas, and a later start; left minus right is ten times the item."""
    data, num_steps = as_pipeline_dataset(kind(8)), 4
    ranks: dict[str, list[list[float]]] = {}
    for name, asked in (
        ("left", rank_parts("left")),
        ("right", rank_parts("right")),
        ("target", rank_parts(target=True)),
        ("replica", rank_parts(target=True, microbatches=(1,))),
    ):
        torch.manual_seed(len(ranks))  # what the rank drew before does not matter
        before = torch.get_rng_state(), global_generator_states()
        loader = batches(asked, data, Position())
        loaded = [next(loader) for _ in range(num_steps)]
        columns = [batch.inputs[name == "right"] if name in ("left", "right") else batch.target for batch in loaded]
        ranks[name] = [_numbers(column) for column in columns]
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == global_generator_states()
    epoch = [[*ranks[name][0], *ranks[name][1]] for name in ("left", "right")]
    assert sorted(round(left - right) for left, right in zip(*epoch, strict=True)) == [10 * i for i in range(8)]
    assert ranks["target"] == ranks["right"]
    assert [step[2:] for step in ranks["replica"]] == [step[2:] for step in ranks["target"]]
    noise = {number for step in ranks["target"] for number in step}
    assert len(noise) == (2 if kind is NoisyEpochs else 16)  # in two epochs of eight items


def test_items_to_evaluate_on_are_of_one_draw_each_time() -> None:
    data = as_pipeline_dataset(Noisy(8))
    first, last = (rank_parts(*names, target=not names) for names in (("right",), ()))
    (_, right), _ = first.load(data, range(4), HELD_OUT)
    _, target = last.load(data, range(4), HELD_OUT)
    assert _numbers(right) == _numbers(target)
    assert len(set(_numbers(target))) == 4
    _, other = replace(last, seed=4).load(data, range(4), HELD_OUT)
    assert _numbers(other) != _numbers(target)


class OwnGenerator(Items):
    """Items with noise from a generator of the data's own."""

    generator = numpy.random.default_rng(0)

    def __getitem__(self, index: Any) -> Any:
        return (self.generator.random(), math.nan), 0


@pytest.mark.parametrize(
    ("kind", "warned"), [(Items, False), (Noisy, False), (NoisyParts, False), (OwnGenerator, True)]
)
def test_data_that_draw_what_nobody_can_draw_again(
    kind: Callable[[int], Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_items_change(as_pipeline_dataset(kind(8)), 2, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_keeps_its_text(num_workers: int) -> None:
    asked = rank_parts("left", target=True)
    data = DatasetSubset(as_pipeline_dataset(Noisy(9)), [8, 8, 8, 8])
    with (
        pytest.raises(BapipeError, match=r"^item 8 cannot be read$"),
        closing(batches(asked, data, Position(), num_workers=num_workers)) as loader,
    ):
        next(loader)


class Odd(Items):
    """Items of which one has another shape and one raises an error."""

    def __getitem__(self, index: Any) -> Any:
        if index == 8:
            raise KeyError("label")
        return (torch.zeros(2 if index == 4 else 1), 0.0), torch.tensor(index)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (8, "the data fail at sample 8: KeyError: 'label'"),
        (
            4,
            "samples of a mini-batch cannot be stacked, they are (1,), (2,): stack expects each tensor to be equal size",
        ),
    ],
)
def test_items_that_do_not_fit_are_named(index: int, message: str) -> None:
    asked = rank_parts("left", target=True)
    data = as_pipeline_dataset(Odd(9))
    with pytest.raises(BapipeError) as caught:
        asked.load(data, [0, 1, 2, index], "epoch 0")
    assert str(caught.value).startswith(message)


def test_too_little_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives 64 MiB. The samples are alike: it is not their shapes."""
    asked = rank_parts("left", target=True)
    reason = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    advice = "make their shared memory larger (/dev/shm; docker: the option shm-size), or use fewer `data_workers`, 0 for none"
    monkeypatch.setattr(loader, "default_collate", Mock(side_effect=RuntimeError(reason)))
    with (
        closing(batches(asked, as_pipeline_dataset(Noisy(9)), Position())) as ended,
        pytest.raises(BapipeError) as caught,
    ):
        next(ended)
    assert str(caught.value) == f"data workers cannot hold a mini-batch: {reason}: {advice}"
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", Mock(side_effect=full))
    with pytest.raises(BapipeError) as caught:
        next(batches(asked, as_pipeline_dataset(Noisy(9)), Position(), num_workers=1))
    assert str(caught.value) == f"data workers cannot start: No space left on device: {advice}"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_shared_memory_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(
        multiprocessing.synchronize.SemLock, "__init__", Mock(side_effect=OSError(number, "Read-only file system"))
    )
    with pytest.raises(BapipeError, match=r"nothing can be written .*: Read-only file system: let this user write to"):
        next(batches(rank_parts("left"), as_pipeline_dataset(Noisy(9)), Position(), num_workers=1))


def test_a_rank_with_data_workers_that_is_ended_leaves_no_warning() -> None:
    script = (
        "import multiprocessing, os\n"
        "from bapipe.training.data.loader import _start_resource_tracker\n"
        "_start_resource_tracker()\n"
        "kept = multiprocessing.get_context('spawn').Lock()\n"
        "assert 'PYTHONWARNINGS' not in os.environ\n"
        "os._exit(0)"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""


@dataclass
class Slow(Dataset[Any]):
    """Data that says whether it is slow to load."""

    is_slow_to_load: bool = True
    hook: object = None

    def __len__(self) -> int:
        return 9


SLOW, FAST = Slow(), Slow(is_slow_to_load=False)


def test_the_default_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def default(cores: int, free_bytes: float, *, data: Dataset[Any] = SLOW, on_gpu: bool = False) -> int:
        monkeypatch.setattr("bapipe.training.data.workers.num_cores", lambda: cores)
        monkeypatch.setattr("bapipe.training.data.workers._free_shared_memory", lambda: free_bytes)
        return num_data_workers(
            None, as_pipeline_dataset(data), on_gpu=on_gpu, num_ranks=2, num_threads=1, batch_bytes=100
        )

    assert default(2, math.inf) == 0
    assert default(4, math.inf) == 1
    assert default(16, math.inf) == 4
    assert default(32, math.inf) == 4
    assert default(32, math.inf, on_gpu=True) == 8
    assert default(16, 2 * 3 * 100 * 2) == 2  # each of two workers has up to three batches, for each of two ranks
    assert default(16, math.inf, data=FAST) == 0
    assert default(16, math.inf, data=Slow(hook=lambda: 0)) == 0  # pickle has no place for it
    assert num_data_workers(7, as_pipeline_dataset(FAST), on_gpu=False, num_ranks=2, num_threads=1, batch_bytes=1) == 7
    monkeypatch.setenv("RANK", "0")
    assert default(16, math.inf) == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert default(16, math.inf) == 0  # a job of torchrun


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(
        "def points(): return [(i, i + 1) for i in range(5)]\ndef none(): return 7\ndef broken(): return 1 / 0\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own")
def test_data_of_a_function() -> None:
    def opened(spec: str) -> Any:
        return f"opened {spec}"

    assert open_data("own_data:points", None, OWN)[4] == (4, 5)
    assert open_data("own_data:points", opened, OWN)[4] == (4, 5)
    for spec in ("synthetic", "a/folder", "locale:de", "c:/data"):
        assert open_data(spec, opened, OWN) == f"opened {spec}"  # type: ignore[comparison-overlap]
    Path("own_data:points").mkdir()  # a folder of that name comes first
    assert open_data("own_data:points", opened, OWN) == "opened own_data:points"  # type: ignore[comparison-overlap]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "synthetic",
            "'own:factory' has no data: give its Example a function named data, or name a function that returns the "
            "data, as `data` module.path:function",
        ),
        (
            "own_date:points",
            "no module 'own_date' for data 'own_date:points': it must be installed, or lie in the current folder",
        ),
        ("own_data:point", "module 'own_data' has no function 'point'; did you mean 'points'?"),
        (
            "own_data:none",
            "data 'own_data:none' is of type int; want a data set with a length and items by number, (input, target) or "
            "((input, ...), target)",
        ),
        ("own_data:broken", "data 'own_data:broken' failed: own_data.py:3: ZeroDivisionError: division by zero"),
    ],
)
def test_data_errors(spec: str, message: str) -> None:
    with pytest.raises(BapipeError) as error:
        open_dataset(spec, None, OWN, buckets=1, augment=False)
    told = re.sub(r"\S*/own_data.py", "own_data.py", str(error.value))  # another test may have imported the module
    assert told == message
