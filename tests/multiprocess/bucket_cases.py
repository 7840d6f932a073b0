"""Workers of test_buckets.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.formats.plan import Plan
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from bapipe.training.data.buckets import bucket_examples
from bapipe.training.launch.worker import Rank
from tests.multiprocess.runtime_cases import make_plan, named_order

BUCKETS = (((3,), (3,)), ((5,), (5,)), ((9,), (9,)))
STEPS = (None, 1, 0, 0, None, 1)
LENGTH = {None: 9, 0: 3, 1: 5}
RATE = 0.1


class Tagger(nn.Module):
    """Scores for each word of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.classifier = nn.Linear(8, 12)

    def forward(self, words: Tensor) -> Tensor:
        x = self.first(self.embedding(words))
        scores: Tensor = self.classifier(x + self.lstm(x)[0])
        return scores


def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger().double()


def loss(scores: Tensor, target: Tensor) -> Tensor:
    summed = functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
    return summed / target.shape[0]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (4, LENGTH[STEPS[step]])
    return torch.randint(1, 12, shape, generator=generator), torch.randint(0, 12, shape, generator=generator)


def plans() -> list[Plan]:
    layers = [layer.name for layer in trace(tagger(), (torch.ones(1, 9, dtype=torch.int64),)).layers]
    order = named_order("1f1b", 2, 2)
    return [
        make_plan(layers, (2,), (0, 1), order, 2, 2),
        make_plan(layers, (2,), (0, 1), order, 2, 2, recompute=(0, 1)),
        make_plan(layers, (), ((0, 1),), [["0F0", "0B0"], ["0F1", "0B1"]], 2, 2),
    ]


def run(rank: Rank) -> list[tuple[list[float | None], dict[str, Any]]]:
    """Returns of each plan the losses, and the parameters of this rank afterwards."""
    return [_run(plan) for plan in plans()]


def _run(plan: Plan) -> tuple[list[float | None], dict[str, Any]]:
    inputs = (torch.ones(1, 9, dtype=torch.int64),)
    pipeline = Pipeline(
        tagger(),
        plan,
        loss=loss,
        inputs=inputs,
        buckets=[bucket_examples(inputs, shapes) for shapes in BUCKETS[:-1]],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    )
    losses = []
    for step, bucket in enumerate(STEPS):
        words, target = batch(step)
        losses.append(pipeline.step(words, target=target, bucket=bucket))
    return losses, {name: tensor.tolist() for name, tensor in pipeline.state_dict().items()}
