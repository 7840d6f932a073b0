"""Mini-batches of a data set in an order drawn from a seed, from any place on; each rank loads what it uses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.runtime.checkpoint.manifest import Position
from bapipe.runtime.data.buckets import bucket_of_batch, bucketed_order, crop
from bapipe.runtime.materialize import layer_seed
from bapipe.runtime.pipeline import Pipeline
from bapipe.zoo.data.dataset import PipelineDataset, item_parts


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch: what a rank does not need is None; `after` is where training is when it is done.

    `bucket` is the number of the bucket that its items are cropped to, None for the shapes of the plan.
    """

    inputs: tuple[Tensor | None, ...]
    target: Tensor | None
    after: Position
    bucket: int | None


def check_enough(plan: Plan, dataset: PipelineDataset[Any]) -> None:
    """Raises BapipeError where the data does not fill a mini-batch."""
    if len(dataset) < plan.minibatch_size:
        raise BapipeError(
            f"the data has {len(dataset)} samples, less than a mini-batch of {plan.minibatch_size}: "
            "give more data, or plan with a smaller --minibatch-size"
        )


def batches(
    pipeline: Pipeline, plan: Plan, dataset: PipelineDataset[Any], seed: int, start: Position
) -> Iterator[Batch]:
    """Yields mini-batches without end; each pass over the data is another order, whose incomplete rest is left out.

    Of data in buckets, a mini-batch has items of similar sizes, cropped to the bucket that fits all of them.
    """
    position, drawn, order, current = start, -1, [], dataset
    while True:
        if position.offset + plan.minibatch_size > len(dataset):
            position = Position(step=position.step, epoch=position.epoch + 1)
        if drawn != position.epoch:
            drawn, order = position.epoch, _order(dataset, plan.minibatch_size, seed, position.epoch)
            current = dataset.at_epoch(drawn)
        end = position.offset + plan.minibatch_size
        chosen = order[position.offset : end]
        position = Position(step=position.step + 1, epoch=position.epoch, offset=end)
        inputs, target = load(pipeline, plan, current, chosen)
        bucket = bucket_of_batch(dataset, chosen)
        if bucket is not None:
            *shapes, last = dataset.bucket_shapes[bucket]
            inputs = tuple(x if x is None else crop(x, shape) for x, shape in zip(inputs, shapes, strict=True))
            target = target if target is None else crop(target, last)
        yield Batch(inputs, target, position, bucket)


def _order(dataset: PipelineDataset[Any], minibatch_size: int, seed: int, epoch: int) -> list[int]:
    num = len(dataset)
    generator = torch.Generator().manual_seed(layer_seed(seed, f"epoch {epoch}"))
    order: list[int] = torch.randperm(num, generator=generator).tolist()
    if not dataset.bucket_shapes:
        return order
    buckets = [dataset.bucket_of(index) for index in range(num)]
    return bucketed_order(buckets, order, minibatch_size, generator)


def load(
    pipeline: Pipeline, plan: Plan, dataset: PipelineDataset[Any], chosen: Sequence[int]
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Returns what this rank uses of the inputs and the target of some items, a mini-batch of them or fewer."""
    size, num = plan.microbatch_size, len(chosen)
    rows = [row for m in pipeline.microbatches for row in range(m * size, min((m + 1) * size, num))]
    needs, names = pipeline.needs, pipeline.input_names
    wanted = [place for place, name in enumerate(names) if name in needs]
    if pipeline.needs_target:
        wanted.append(len(names))
    columns = _columns(dataset, [chosen[row] for row in rows or [0]], wanted, len(names)) if wanted else {}
    stacked = {place: _stack(rows or [0], num, column) for place, column in columns.items()}
    return tuple(stacked.get(place) for place in range(len(names))), stacked.get(len(names))


def _columns(
    dataset: PipelineDataset[Any], indices: Sequence[int], wanted: Sequence[int], num_inputs: int
) -> dict[int, list[Any]]:
    """Returns some parts of items; the target's place is after the inputs'. Loads no other, where the data can."""
    if dataset.provides("part"):
        return {place: [dataset.part(index, place) for index in indices] for place in wanted}
    rows = [item_parts(dataset[index]) for index in indices]
    if any(len(row) != num_inputs + 1 for row in rows):
        raise BapipeError(f"the model takes {num_inputs} inputs; the data gives {len(rows[0]) - 1} a sample")
    return {place: [row[place] for row in rows] for place in wanted}


def _stack(rows: Sequence[int], num_samples: int, values: list[Any]) -> Tensor:
    """Returns a mini-batch with values in some rows and anything in the others."""
    batch = default_collate(values)
    if not isinstance(batch, Tensor):
        raise BapipeError(f"a batch of the data is a {type(batch).__name__}, not a tensor")
    if len(rows) == num_samples:
        return batch
    return batch.new_empty(num_samples, *batch.shape[1:]).index_copy_(0, torch.tensor(rows), batch)
