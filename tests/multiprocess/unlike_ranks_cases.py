"""Ranks that were given different modules and plans."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bapipe.errors import BapipeError
from bapipe.runtime.pipeline import Pipeline
from bapipe.training.launch.worker import Rank
from tests.multiprocess.runtime_cases import make_plan, named_order

WORDS = torch.arange(4) % 3


class Tied(nn.Module):
    """Its first and last layers share a weight, which is frozen or not."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        self.head.weight = self.words.weight
        self.words.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.middle(self.words(x)))
        return y


class Squashed(Tied):
    """The same in a later version."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.middle(self.words(x)).tanh())
        return y


def run(rank: Rank) -> tuple[list[list[float]], list[str]]:
    """Returns the tied weights, trained and frozen, after a step, and what is said of different plans and models.

    The last module has values in the first process only, as one that loads a checkpoint for all.
    """
    order, group = named_order("1f1b", 2, 2), dist.new_group([0, 1])
    tied = []
    for frozen, in_group, is_on_meta in (
        (False, None, False),
        (True, None, False),
        (True, group, False),
        (False, None, rank.index > 0),
    ):
        torch.manual_seed(rank.index)
        with torch.device("meta" if is_on_meta else "cpu"):
            module = Tied(frozen=frozen)
        plan = make_plan(["words", "middle", "head"], (2,), (0, 1), order, 2, 2)
        pipeline = Pipeline(module, plan, loss=cross_entropy, inputs=[WORDS], group=in_group)
        pipeline.step(WORDS, target=WORDS)
        tied.append(pipeline.state_dict()["words.weight"].flatten().tolist())
    model = Squashed if rank.index > 0 else Tied
    said = []
    for cut, module in ((1 + rank.index, Tied(frozen=True)), (2, model(frozen=True))):
        plan = make_plan(["words", "middle", "head"], (cut,), (0, 1), order, 2, 2)
        try:
            Pipeline(module, plan, loss=cross_entropy, inputs=[WORDS])
        except BapipeError as error:
            said.append(str(error))
    return tied, said
