"""What layers and losses draw, in plans of one process."""

import random
from collections import defaultdict

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.rng import PerOperatorRng
from bapipe.schedules.table import Action, Phase
from tests.multiprocess.runtime_cases import make_plan

X, Y = torch.randn(4, 3), torch.randn(4, 3)
ORDER = ["0F0", "1F0", "2F0", "0F1", "1F1", "2F1", "2B0", "1B0", "0B0", "2B1", "1B1", "0B1"]

Drawn = dict[str, list[tuple[float, float, float]]]


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


class Dropped(nn.Module):
    """Leaves itself out half of the time, by a number of Python's, numpy's or torch's generator."""

    def __init__(self, name: str, drawn: Drawn) -> None:
        super().__init__()
        self.linear, self.name, self.drawn = nn.Linear(3, 3), name, drawn

    def forward(self, x: Tensor) -> Tensor:
        numbers = draw()
        self.drawn[self.name].append(numbers)
        y: Tensor = self.linear(x) * numbers[2]
        return y if numbers[0] < 0.5 or numbers[1] < 0.5 else x


class Noisy(nn.Module):
    """A loss with random numbers, which it keeps."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.drawn["loss"].append(draw())
        return mse_loss(output + 0.1 * torch.randn_like(output), target)


def trained(
    cuts: tuple[int, ...], recompute: tuple[int, ...] = (), recompute_layers: tuple[str, ...] = ()
) -> tuple[Drawn, list[float | None], dict[str, Tensor]]:
    """What is drawn in two steps, their losses, and the parameters afterwards."""
    torch.manual_seed(0)
    drawn: Drawn = defaultdict(list)
    module = nn.Sequential(nn.Linear(3, 3), Dropped("first", drawn), Dropped("last", drawn))
    module[0].register_forward_hook(lambda *_: drawn["hook"].append(draw()))
    order = [action for action in ORDER if int(action[0]) <= len(cuts)]
    plan = make_plan("012", cuts, [0] * (len(cuts) + 1), [order], 2, 2, recompute, recompute_layers)
    pipeline = Pipeline(module, plan, loss=Noisy(drawn), inputs=(X,), optimizer=sgd(0.1), check=False)
    drawn.clear()
    losses = [pipeline.step(X, target=Y) for _ in range(2)]
    return drawn, losses, {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


@pytest.mark.usefixtures("alone")
def test_layers_and_losses_draw_the_same_under_every_plan_and_when_they_run_again() -> None:
    want, want_losses, want_parameters = trained(())
    assert {name: len(numbers) for name, numbers in want.items()} == dict.fromkeys(("first", "hook", "last", "loss"), 4)
    for generator in range(3):  # two steps of two micro-batches: all numbers of a generator are different ones
        assert len({numbers[generator] for of in want.values() for numbers in of}) == 4 * len(want)
    for cuts, recompute, layers in (
        ((1, 2), (), ()),
        ((2,), (0,), ()),
        ((1, 2), (0, 1, 2), ()),
        ((1,), (), ("1",)),
    ):
        drawn, losses, parameters = trained(cuts, recompute, layers)
        assert {name: set(numbers) for name, numbers in drawn.items()} == {n: set(of) for n, of in want.items()}
        assert losses == pytest.approx(want_losses, rel=1e-6)
        for name, tensor in want_parameters.items():
            torch.testing.assert_close(parameters[name], tensor, msg=name)


def test_layers_on_a_gpu_that_draw_on_the_cpu_draw_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    rng = PerOperatorRng(0, torch.device("cuda", 0))
    rng("layer", False)
    first = torch.rand(()), torch.rand((), generator=torch.cuda.default_generators[0])
    rng("layer", False)
    assert first == (torch.rand(()), torch.rand((), generator=torch.cuda.default_generators[0]))


def test_a_loss_draws_by_seed_step_and_microbatch_on_whichever_rank() -> None:
    def drawn(*, seed: int = 0, step: int = 0, stage: int = 1, microbatch: int = 0) -> tuple[float, float, float]:
        rng = PerOperatorRng(seed, torch.device("cpu"))
        rng.step = step
        rng.enter(Action(stage, Phase.FORWARD, microbatch))
        draw()  # whatever the stage draws
        rng.enter_loss()
        return draw()

    assert drawn() == drawn(stage=3)
    assert len({drawn(), drawn(seed=1), drawn(step=1), drawn(microbatch=1)}) == 4
