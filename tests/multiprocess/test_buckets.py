"""Mini-batches of several sizes train a pipeline as they train one process."""

import pytest
import torch
from torch import Tensor

from bapipe.training.launch.processes import launch
from tests.multiprocess.bucket_cases import RATE, STEPS, batch, loss, plans, run, tagger


def whole() -> tuple[list[float], dict[str, Tensor]]:
    model = tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(len(STEPS)):
        words, target = batch(step)
        found = loss(model(words), target)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses, model.state_dict()


def test_each_step_equals_that_of_one_process() -> None:
    losses, state = whole()
    ranks = launch(run, ["cpu0", "cpu1"], timeout_s=60)
    for place, _ in enumerate(plans()):
        knowing = [rank[place][0] for rank in ranks if None not in rank[place][0]]
        assert knowing
        for told in knowing:
            assert told == pytest.approx(losses, abs=1e-7)
        held = {name: tensor for rank in ranks for name, tensor in rank[place][1].items()}
        assert sorted(held) == sorted(state)
        for name, values in held.items():
            assert torch.allclose(torch.tensor(values, dtype=torch.float64), state[name], rtol=1e-9, atol=1e-12), name
