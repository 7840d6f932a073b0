"""Evaluation of a pipeline on held-out data: mean loss, mean metrics, and scores of generated texts."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BapipeError, InvalidModel
from bapipe.formats.plan import Plan
from bapipe.runtime.evaluation import LossSums
from bapipe.runtime.pipeline import Pipeline
from bapipe.training.data.loader import HELD_OUT, RankParts
from bapipe.training.evaluate.generate import greedy_decode
from bapipe.training.train_result import Evaluation
from bapipe.zoo.data.dataset import PipelineDataset
from bapipe.zoo.example import GenerationConfig

Metric = Callable[[Any, Tensor], Tensor]
"""(output, target) -> a value for each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """What to evaluate on, and how.

    Attributes:
        generation: how texts are generated; None if the model generates none.
        max_length: maximum number of words of a generated text, including its end.
        seed: seed of the random numbers that items draw.
    """

    dataset: PipelineDataset[Any]
    metrics: Mapping[str, Metric]
    generation: GenerationConfig | None
    max_length: int = 0
    seed: int = 0


def check_scores(data: EvaluationData) -> None:
    """Raises BapipeError if a score cannot be computed, or has the name of another value; called before training."""
    for name in ("loss", "steps", "num_samples"):
        if name in data.metrics:
            raise BapipeError(f"a metric is named '{name}', as something else that is reported: give it another name")
    if data.generation is None:
        return
    for score in data.generation.scores.values():
        score(["a"], ["a"])
    for name in ("text", "reference"):
        if not data.dataset.provides(name):
            raise BapipeError(
                f"what this model generates cannot be scored, because the data has no '{name}': see bapipe.Example, or "
                "train without `evaluate_every`"
            )


def evaluate(
    pipeline: Pipeline,
    plan: Plan,
    data: EvaluationData,
    device: torch.device,
    steps: int,
    on_progress: Callable[[int], None],
) -> Evaluation:
    """Returns loss, metrics and scores after `steps` steps, the same on every rank; all ranks call it together.

    Every sample counts once, also those of a last, smaller batch. The model is not changed. `on_progress` is called
    with the number of samples that are done.
    """
    start_ns = time.perf_counter_ns()
    total, parts = len(data.dataset), RankParts.of(pipeline, plan, data.seed)
    sums = torch.zeros(len(LossSums._fields) + len(data.metrics), dtype=torch.float64, device=device)
    texts: list[str] = []
    for first in range(0, total, plan.minibatch_size):
        chosen = range(first, min(first + plan.minibatch_size, total))
        inputs, target = parts.load(data.dataset, chosen, HELD_OUT)
        sums += _sums(pipeline, data.metrics, inputs, target, len(chosen), device)
        if data.generation is not None:
            words = greedy_decode(pipeline, data.generation, inputs, (len(chosen), data.max_length), device)
            texts += [data.dataset.text(row) for row in words.tolist()]
        on_progress(chosen.stop)
    losses, of_metrics = sums[: len(LossSums._fields)], sums[len(LossSums._fields) :]
    metrics = {name: value / total for name, value in zip(data.metrics, of_metrics.tolist(), strict=True)}
    if data.generation is not None:
        references = [data.dataset.reference(index) for index in range(total)]
        metrics |= {name: score(texts, references) for name, score in data.generation.scores.items()}
    return Evaluation(
        steps=steps,
        num_samples=total,
        loss=LossSums(*losses.tolist()).mean,
        metrics=tuple(metrics.items()),
        elapsed_ns=time.perf_counter_ns() - start_ns,
    )


def _sums(
    pipeline: Pipeline,
    metrics: Mapping[str, Metric],
    inputs: Sequence[Tensor | None],
    target: Tensor | None,
    num_samples: int,
    device: torch.device,
) -> Tensor:
    """Returns the `LossSums` of a batch, and metrics summed over its samples, on every rank."""
    result = pipeline.evaluate(*inputs, target=target, num_samples=num_samples, keep=_output if metrics else _nothing)
    # [ranks that know the losses, their sums, sum of each metric]
    of_metrics = 1 + len(LossSums._fields)
    sums = torch.zeros(of_metrics + len(metrics), dtype=torch.float64, device=device)
    if result is not None and result.losses is not None and target is not None:
        sums[:of_metrics] = torch.tensor((1, *result.losses), dtype=torch.float64)
        for rows, output in zip(result.rows, result.outputs, strict=True) if metrics else ():
            expected = target[rows.start : rows.stop].to(device)
            for i, (name, metric) in enumerate(metrics.items(), start=of_metrics):
                sums[i] += _of_each_sample(name, metric(output, expected), len(rows)).double().sum()
    dist.all_reduce(sums)
    # Every replica of the last stage gave all losses, but the metrics of its own samples only.
    sums[1:of_metrics] /= sums[0].clone()  # on the device: reading it would wait for a GPU
    return sums[1:]


def _of_each_sample(name: str, values: object, num_samples: int) -> Tensor:
    """Returns what a metric gave, if it is a value for each sample; else raises InvalidModel. [samples]"""
    if isinstance(values, Tensor) and values.shape == (num_samples,):
        return values
    found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"{type(values).__name__} {values!r}"
    raise InvalidModel(
        f"metric '{name}' gives {found} for {num_samples} samples: want a tensor with a value for each, of which "
        "the mean over all held-out samples is reported"
    )


def _output(output: Any) -> Any:
    return output


def _nothing(output: Any) -> None:
    return None
