"""Workers of test_held_out.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from bapipe.formats.plan import Plan
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from bapipe.training.data.loader import HELD_OUT, RankParts
from bapipe.training.evaluate.evaluate import EvaluationData, evaluate
from bapipe.training.evaluate.generate import greedy_decode
from bapipe.training.launch.worker import Rank
from bapipe.training.train_result import Evaluation
from bapipe.zoo.data.dataset import DatasetSubset, as_pipeline_dataset
from bapipe.zoo.data.translation import END
from bapipe.zoo.example import Example
from bapipe.zoo.factory import build
from bapipe.zoo.metrics import top_1
from tests.multiprocess.runtime_cases import make_plan, named_order

NUM = 7
"""Samples held out: a mini-batch of two micro-batches of 2, and one of a whole and half a one."""

PLANS: tuple[tuple[tuple[int, ...], tuple[int | tuple[int, ...], ...]], ...] = (((5,), (0, 1)), ((), ((0, 1),)))
"""Cuts and ranks: two stages, and a stage of two replicas."""


def translator() -> Example:
    torch.manual_seed(3)
    sizes = {"num_pairs": 2, "hidden_size": 8, "vocabulary_size": 12, "source_length": 5, "target_length": 6}
    example = build("bapipe.zoo.gnmt:gnmt", sizes)
    with torch.no_grad():
        for parameter in example.module.parameters():
            parameter += torch.randn_like(parameter)  # else it says the same to every sentence
        example.module.decoder.classifier.bias[END] += 1  # type: ignore[index, union-attr]
    return example


def sentences(example: Example) -> DatasetSubset:
    assert example.data is not None
    return DatasetSubset(as_pipeline_dataset(example.data("synthetic")), range(20, 20 + NUM))


def classifier() -> Example:
    """Classes are what an input is largest in; batch norm and dropout would change that in training."""
    module = nn.Sequential(
        nn.Identity(),
        nn.Dropout(0.9),
        nn.BatchNorm1d(3),
        nn.Linear(3, 3, bias=False),
        nn.Identity(),
        nn.Identity(),
    )
    with torch.no_grad():
        module[3].weight.copy_(torch.eye(3))
    return Example(
        module=module,
        inputs=(torch.zeros(2, 3),),
        target=torch.zeros(2, dtype=torch.int64),
        loss=functional.cross_entropy,
        metrics={"top-1": top_1},
    )


def points() -> TensorDataset:
    """Seven points; the classes of the first, the third and the last are others than what they are largest in."""
    largest, classes = torch.tensor([0, 1, 2, 2, 1, 0, 1]), torch.tensor([1, 1, 0, 2, 1, 0, 2])
    return TensorDataset(functional.one_hot(largest, 3).float(), classes)


@dataclass(frozen=True)
class Outcome:
    found: Evaluation
    again: Evaluation
    told: list[int]
    words: list[list[int]] | None


def run(rank: Rank) -> list[Outcome]:
    outcomes = []
    for cuts, ranks in PLANS:
        for make, data in ((translator, sentences), (classifier, lambda _: as_pipeline_dataset(points()))):
            example = make()
            outcomes.append(_run(rank, example, _plan(example, cuts, ranks), data(example)))
    return outcomes


def _plan(example: Example, cuts: Sequence[int], ranks: Sequence[int | tuple[int, ...]]) -> Plan:
    layers = [layer.name for layer in trace(example.module, example.tensors).layers]
    order = named_order("1f1b", 2, 2) if cuts else [["0F0", "0B0"], ["0F1", "0B1"]]
    return make_plan(layers, cuts, ranks, order, 2, 2)


def _run(rank: Rank, example: Example, plan: Plan, data: Any) -> Outcome:
    pipeline = Pipeline(example.module, plan, loss=example.loss, inputs=example.tensors, evaluates=True)
    held_out = EvaluationData(dataset=data, metrics=example.metrics, generation=example.generation, max_length=6)
    told: list[int] = []
    found, again = (evaluate(pipeline, plan, held_out, rank.device, 5, told.append) for _ in range(2))
    words = None
    if example.generation is not None:
        inputs, _ = RankParts.of(pipeline, plan, 0).load(data, range(4), HELD_OUT)
        words = greedy_decode(pipeline, example.generation, inputs, (4, 6), rank.device).tolist()
    return Outcome(found, again, told, words)
