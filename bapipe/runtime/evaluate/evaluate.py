"""How a pipeline does on held-out data: mean loss, metrics of each sample, and scores of what it writes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.runtime.data.loader import load, num_samples
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.train_result import Evaluation

Metric = Callable[[Any, Tensor], Tensor]
"""(output, target) -> a value for each sample."""

Score = Callable[[Sequence[str], Sequence[str]], float]
"""(texts, references) -> a score of all of them."""


class Writing(Protocol):
    """How a model writes word by word; see `bapipe.zoo.example.Writing`."""

    @property
    def place(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def scores(self) -> Mapping[str, Score]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What to evaluate on, and how; texts have `text_length` words at most, their end included."""

    dataset: Dataset[Any]
    metrics: Mapping[str, Metric]
    writing: Writing | None
    text_length: int = 0


def check_scores(held_out: HeldOut) -> None:
    """Raises BapipeError where a score cannot be computed, before hours of training find out."""
    if held_out.writing is None:
        return
    for score in held_out.writing.scores.values():
        score(["a"], ["a"])
    for name in ("text", "reference"):
        if not hasattr(held_out.dataset, name):
            raise BapipeError(
                f"what this model writes cannot be scored, because the data has no `{name}`: see bapipe.Example, or "
                "train without --eval-every"
            )


def validate(
    pipeline: Pipeline, plan: Plan, held_out: HeldOut, device: torch.device, steps: int, tell: Callable[[int], None]
) -> Evaluation:
    """Returns how a pipeline does after so many steps, the same on every rank; all ranks call it together.

    Every sample counts once, those of a last, smaller batch too. What was trained stays as it is. `tell` is called
    with the number of samples that are done.
    """
    start_ns = time.perf_counter_ns()
    total = num_samples(held_out.dataset)
    sums = torch.zeros(1 + len(held_out.metrics), dtype=torch.float64, device=device)
    texts: list[str] = []
    for first in range(0, total, plan.minibatch_size):
        chosen = range(first, min(first + plan.minibatch_size, total))
        inputs, target = load(pipeline, plan, held_out.dataset, chosen)
        sums += _sums(pipeline, held_out.metrics, inputs, target, len(chosen), device)
        if held_out.writing is not None:
            words = written(pipeline, held_out.writing, inputs, (len(chosen), held_out.text_length), device)
            texts += [held_out.dataset.text(row) for row in words.tolist()]  # type: ignore[attr-defined]
        tell(chosen.stop)
    loss, *values = (sums / total).tolist()
    metrics = dict(zip(held_out.metrics, values, strict=True))
    if held_out.writing is not None:
        references = [held_out.dataset.reference(index) for index in range(total)]  # type: ignore[attr-defined]
        metrics |= {name: score(texts, references) for name, score in held_out.writing.scores.items()}
    return Evaluation(
        steps=steps,
        num_samples=total,
        loss=loss,
        metrics=tuple(metrics.items()),
        elapsed_ns=time.perf_counter_ns() - start_ns,
    )


def _sums(
    pipeline: Pipeline,
    metrics: Mapping[str, Metric],
    inputs: Sequence[Tensor | None],
    target: Tensor | None,
    num: int,
    device: torch.device,
) -> Tensor:
    """Returns loss and metrics of a batch, summed over its samples, on every rank."""
    found = pipeline.evaluate(*inputs, target=target, num_samples=num, keep=_kept if metrics else _nothing)
    own = torch.zeros(2 + len(metrics), dtype=torch.float64, device=device)
    if found is not None and found.loss is not None and target is not None:
        own[0], own[1] = 1, found.loss * num  # each rank of the last stage knows all of the loss
        for rows, output in zip(found.rows, found.outputs, strict=True) if metrics else ():
            right = target[rows.start : rows.stop].to(device)
            for place, metric in enumerate(metrics.values(), start=2):
                own[place] += metric(output, right).double().sum()
    dist.all_reduce(own)
    own[1] /= own[0]
    return own[1:]


def _kept(output: Any) -> Any:
    return output


def _nothing(output: Any) -> None:
    return None


def written(
    pipeline: Pipeline, writing: Writing, inputs: Sequence[Tensor | None], shape: tuple[int, int], device: torch.device
) -> Tensor:
    """Returns the most likely words that a model writes, one after another, as [num, length] and on every rank.

    Each word is a forward pass of the whole model over all words so far. Behind the end of a text stands padding.
    """
    num, length = shape
    before, words = torch.full(shape, writing.pad), torch.full(shape, writing.pad)
    before[:, 0] = writing.begin
    going = torch.ones(num, dtype=torch.bool)
    for place in range(length):
        given = [before if i == writing.place and tensor is not None else tensor for i, tensor in enumerate(inputs)]
        words[:, place] = torch.where(going, _next(pipeline, given, place, num, device), writing.pad)
        going &= words[:, place] != writing.end
        if not going.any() or place + 1 == length:
            break
        before[:, place + 1] = torch.where(going, words[:, place], writing.pad)
    return words


def _next(pipeline: Pipeline, inputs: Sequence[Tensor | None], place: int, num: int, device: torch.device) -> Tensor:
    """Returns the most likely word at a place of each text."""
    found = pipeline.evaluate(*inputs, num_samples=num, keep=lambda scores: scores[:, place].argmax(-1))
    own = torch.zeros(num, dtype=torch.int64, device=device)
    if found is not None:
        for rows, words in zip(found.rows, found.outputs, strict=True):
            own[rows.start : rows.stop] = words
    dist.all_reduce(own)
    return own.cpu()
