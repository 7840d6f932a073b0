"""Mini-batches of a data set in an order drawn from a seed, from any position on; each rank loads only what it uses.

`torch.utils.data.DataLoader` loads them, in worker processes if there are any. A sampler draws the order; the requests
that it yields hold all that a mini-batch depends on, so results depend neither on the number of workers nor on the
position that a run resumes from.
"""

import errno
import logging
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from bapipe.errors import BapipeError, first_line
from bapipe.formats.plan import Plan
from bapipe.module_state.python_random import all_generators_restored
from bapipe.processes import end_with
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.rng import derived_seed, seed_item
from bapipe.stop_signals import ignore_signals
from bapipe.torch_device import CPU, is_out_of_memory
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.data.buckets import bucket_of_batch, bucketed_order, crop
from bapipe.training.data.index_array import index_array
from bapipe.zoo.data.dataset import PipelineDataset, item_parts

_log = logging.getLogger(__name__)

PREFETCH = 2
"""Mini-batches that each worker process loads ahead."""

_NO_SHARED_MEMORY = ("unable to allocate shared memory", "unable to open shared memory")
"""Texts that tell torch's errors about shared memory from its other RuntimeErrors."""

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A mini-batch to load: its epoch, its items, their bucket, and the position after it."""

    epoch: int
    indices: tuple[int, ...]
    bucket: int | None
    after: Position


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch; inputs, or a target, that this rank does not need are None.

    Attributes:
        after: the position of training after this mini-batch.
        bucket: index of the bucket that its items are cropped to; None for the shapes of the plan.
    """

    inputs: tuple[Tensor | None, ...]
    target: Tensor | None
    after: Position
    bucket: int | None

    def pin_memory(self) -> "Batch":
        """Returns the batch in page-locked memory, from which copies to a GPU need not wait; DataLoader calls it."""
        inputs = tuple(None if x is None else x.pin_memory() for x in self.inputs)
        return replace(self, inputs=inputs, target=None if self.target is None else self.target.pin_memory())

    def share_memory(self) -> "Batch":
        """Returns the batch, moved to the shared memory by which a worker sends it: errors can be caught here."""
        for tensor in (*self.inputs, self.target):
            if tensor is not None:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        return self


HELD_OUT = "held out"
"""The argument `data` of `RankParts.load` for data to evaluate on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What a rank uses of a mini-batch.

    Attributes:
        seed: seed of the run.
        num_inputs: number of inputs of the model.
        places: indices of the parts of an item that it uses, see `PipelineDataset`.
        microbatches, microbatch_size: the micro-batches whose samples it uses, and their size.
        minibatch_size: number of samples of all ranks together.
    """

    seed: int
    num_inputs: int
    places: tuple[int, ...]
    microbatches: tuple[int, ...]
    microbatch_size: int
    minibatch_size: int

    @staticmethod
    def of(pipeline: Pipeline, plan: Plan, seed: int) -> "RankParts":
        names = pipeline.input_names
        places = [place for place, name in enumerate(names) if name in pipeline.needs]
        if pipeline.needs_target:
            places.append(len(names))
        return RankParts(
            seed=seed,
            num_inputs=len(names),
            places=tuple(places),
            microbatches=pipeline.microbatches,
            microbatch_size=plan.microbatch_size,
            minibatch_size=plan.minibatch_size,
        )

    def load(
        self, dataset: PipelineDataset[Any], indices: Sequence[int], data: str
    ) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
        """Returns the inputs and the target of up to a mini-batch of items; None for parts that this rank does not use.

        Rows of micro-batches that run on other ranks are left uninitialized. The random numbers that an item draws
        depend only on the seed, `data` (see `seed_item`) and its index; generators are restored afterwards.
        """
        size, num = self.microbatch_size, len(indices)
        rows = [row for m in self.microbatches for row in range(m * size, min((m + 1) * size, num))]
        used = rows or [0]  # a rank without samples in a last, smaller batch still needs tensors of the right shape
        with all_generators_restored():
            columns = self._columns(dataset, [indices[row] for row in used], data) if self.places else {}
        stacked = {place: _stack(used, num, column) for place, column in columns.items()}
        return tuple(stacked.get(place) for place in range(self.num_inputs)), stacked.get(self.num_inputs)

    def _columns(self, dataset: PipelineDataset[Any], indices: Sequence[int], data: str) -> dict[int, list[Any]]:
        """Returns the values of each part that the rank uses; loads no other part if the data set allows it."""

        def loaded(index: int, load: Callable[[], T]) -> T:
            seed_item(self.seed, data, index)
            return _loaded(index, load)

        if dataset.provides("part"):
            return {
                place: [loaded(index, partial(dataset.part, index, place)) for index in indices]
                for place in self.places
            }
        items = [loaded(index, partial(_parts, dataset, index)) for index in indices]
        if any(len(item) != self.num_inputs + 1 for item in items):
            raise BapipeError(
                f"the model takes {self.num_inputs} inputs; the data gives {len(items[0]) - 1} inputs per sample"
            )
        return {place: [item[place] for item in items] for place in self.places}


class MinibatchSampler(Sampler[BatchRequest]):
    """Yields requests without end; each epoch is another permutation of the data, without an incomplete last batch.

    If the data has buckets, a mini-batch has items of similar sizes, and the smallest bucket that fits all of them.
    """

    def __init__(self, dataset: PipelineDataset[Any], minibatch_size: int, seed: int, start: Position) -> None:
        self._dataset, self._size, self._seed, self._start = dataset, minibatch_size, seed, start

    def __iter__(self) -> Iterator[BatchRequest]:
        position, drawn_epoch = self._start, -1
        order: Sequence[int] = ()
        while True:
            if position.offset + self._size > len(self._dataset):
                position = Position(step=position.step, epoch=position.epoch + 1)
            if drawn_epoch != position.epoch:
                drawn_epoch, order = position.epoch, self._order(position.epoch)
            end = position.offset + self._size
            indices = tuple(order[position.offset : end])
            after = Position(step=position.step + 1, epoch=position.epoch, offset=end)
            bucket = bucket_of_batch(self._dataset, indices)
            yield BatchRequest(epoch=position.epoch, indices=indices, bucket=bucket, after=after)
            position = after

    def _order(self, epoch: int) -> Sequence[int]:
        num = len(self._dataset)
        generator = torch.Generator().manual_seed(derived_seed(self._seed, f"epoch {epoch}"))
        order = index_array(torch.randperm(num, generator=generator, device=CPU))
        if not self._dataset.bucket_shapes:
            return order
        buckets = [self._dataset.bucket_of(index) for index in range(num)]
        return bucketed_order(buckets, order, self._size, generator)


class _Batches(Dataset[Batch | BapipeError]):
    """Mini-batches by request. Errors for users are returned: DataLoader would hide their text in a stack trace."""

    def __init__(self, dataset: PipelineDataset[Any], parts: RankParts) -> None:
        self._dataset, self._parts = dataset, parts
        self._epoch, self._epoch_dataset = -1, dataset

    def __getitem__(self, request: BatchRequest) -> Batch | BapipeError:
        try:
            batch = self._load(request)
            return batch if get_worker_info() is None else batch.share_memory()
        except BapipeError as error:
            return error
        except RuntimeError as error:
            if not _lacks_shared_memory(error):
                raise
            return _no_room(f"cannot hold a mini-batch: {first_line(error)}")

    def _load(self, request: BatchRequest) -> Batch:
        data = f"epoch {request.epoch}"
        if request.epoch != self._epoch:
            with all_generators_restored():
                seed_item(self._parts.seed, data, None)
                self._epoch, self._epoch_dataset = request.epoch, self._dataset.at_epoch(request.epoch)
        inputs, target = self._parts.load(self._epoch_dataset, request.indices, data)
        if request.bucket is not None:
            *shapes, target_shape = self._dataset.bucket_shapes[request.bucket]
            inputs = tuple(None if x is None else crop(x, shape) for x, shape in zip(inputs, shapes, strict=True))
            target = None if target is None else crop(target, target_shape)
        return Batch(inputs, target, request.after, request.bucket)


def batches(
    parts: RankParts,
    dataset: PipelineDataset[Any],
    start: Position,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """Yields mini-batches without end, from a position on. Close the iterator to end its worker processes."""
    num_workers = num_workers if parts.places else 0  # a rank in the middle of a pipeline may load nothing
    if num_workers:
        _start_resource_tracker()
        _check_semaphores(num_workers)
    loader = DataLoader(
        _Batches(dataset, parts),
        sampler=MinibatchSampler(dataset, parts.minibatch_size, parts.seed, start),
        batch_size=None,  # a request is a whole mini-batch
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        # Forked workers would hold the rank's sockets open after it dies, and other ranks would wait for it.
        multiprocessing_context="spawn" if num_workers else None,
        worker_init_fn=partial(_begin_worker, os.getpid()) if num_workers else None,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else starting the loader draws from the global generator
    )
    for batch in loader:
        if isinstance(batch, BapipeError):
            raise batch
        yield batch


def _start_resource_tracker() -> None:
    """Starts Python's resource tracker, which removes semaphores of killed ranks, without its warnings on stderr."""
    before = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = f"{before},{quiet}" if before else quiet
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def _check_semaphores(num_workers: int) -> None:
    """Raises BapipeError if there is no room for the semaphores of data workers: DataLoader would print a traceback."""
    context = multiprocessing.get_context("spawn")
    try:
        # DataLoader has a queue for each worker and one for results, of three semaphores each, and an event of five.
        _ = [context.Queue() for _ in range(num_workers + 3)]
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            raise BapipeError(
                f"data workers cannot start, as nothing can be written to their shared memory: {error.strerror}: let "
                "this user write to /dev/shm, or set `data_workers` to 0"
            ) from None
        if error.errno != errno.ENOSPC:
            raise
        raise _no_room(f"cannot start: {error.strerror}") from None


def _lacks_shared_memory(error: Exception) -> bool:
    return any(sign in str(error) for sign in _NO_SHARED_MEMORY)


def _no_room(what: str) -> BapipeError:
    return BapipeError(
        f"data workers {what}: make their shared memory larger (/dev/shm; docker: the option shm-size), or use fewer "
        "`data_workers`, 0 for none"
    )


def _begin_worker(rank_pid: int, number: int) -> None:
    """Makes a worker end when its rank does, for whatever reason, and leaves signals to the rank."""
    end_with(rank_pid)
    ignore_signals(number)


def check_enough(plan: Plan, dataset: PipelineDataset[Any]) -> None:
    """Raises BapipeError if the data does not fill a mini-batch."""
    if len(dataset) < plan.minibatch_size:
        raise BapipeError(
            f"the data has {len(dataset)} samples, less than a mini-batch of {plan.minibatch_size}: "
            "give more data, or plan with a smaller `minibatch_size`"
        )


def warn_if_items_change(dataset: PipelineDataset[Any], num_inputs: int, seed: int) -> None:
    """Warns if the first item differs when it is loaded again; `num_inputs` is the model's number of inputs."""
    places = tuple(range(num_inputs + 1))
    parts = RankParts(
        seed=seed, num_inputs=num_inputs, places=places, microbatches=(0,), microbatch_size=1, minibatch_size=1
    )
    first, again = (parts.load(dataset, [0], "epoch 0") for _ in range(2))
    try:
        torch.testing.assert_close(again, first, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        _log.warning(
            "the data give another sample 0 each time that it is loaded: they keep state, or draw from a random "
            "generator of their own. Each rank loads for itself what it uses of a sample, so the ranks may train on an "
            "input and a target of different draws: draw from the global generators of torch, Python or numpy, which "
            "are seeded for each sample"
        )


def _parts(dataset: PipelineDataset[Any], index: int) -> tuple[Any, ...]:
    return item_parts(dataset[index])


def _loaded(index: int, load: Callable[[], T]) -> T:
    """Returns what `load` returns; any error of the data set becomes a BapipeError that names the sample."""
    try:
        return load()
    except BapipeError:
        raise
    except Exception as error:  # whatever the data set's own code raises
        raise BapipeError(f"the data fail at sample {index}: {type(error).__name__}: {error}") from error


def _stack(rows: Sequence[int], num_samples: int, values: list[Any]) -> Tensor:
    """Returns a tensor with `values` in the given rows, the others uninitialized. [num_samples, ...]"""
    try:
        batch = default_collate(values)
    except (RuntimeError, TypeError) as error:  # samples of different shapes, or of no type that can be stacked
        if _lacks_shared_memory(error) or is_out_of_memory(error):
            raise
        shapes = sorted({str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in values})
        raise BapipeError(
            f"samples of a mini-batch cannot be stacked, they are {', '.join(shapes[:5])}: {first_line(error)}"
        ) from error
    if not isinstance(batch, Tensor):
        raise BapipeError(f"a batch of the data is a {type(batch).__name__}, not a tensor")
    if len(rows) == num_samples:
        return batch
    return batch.new_empty(num_samples, *batch.shape[1:]).index_copy_(0, torch.tensor(rows, device=batch.device), batch)
