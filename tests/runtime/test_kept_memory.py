"""What a step leaves in memory: the gradients, and no tensor of a micro-batch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from benchmarks.fidelity import allocated
from tests.multiprocess.runtime_cases import make_plan

X, Y = torch.randn(64, 100), torch.randn(64, 100)
NUM_MICROBATCHES = 4
ACTIVATION_BYTES = 16 * 100 * 4  # of a micro-batch


@pytest.mark.parametrize("backward", ["B", "IW"])
@pytest.mark.parametrize("recompute", [(), (0, 1, 2)])
@pytest.mark.usefixtures("alone")
def test_a_step_leaves_the_gradients_alone(backward: str, recompute: tuple[int, ...]) -> None:
    """What I leaves of the graph for W, tensors that stages of one process pass on, and their gradients are freed."""
    module = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(100, 100), nn.GELU())))
    order = [f"{s}F{m}" for m in range(NUM_MICROBATCHES) for s in (0, 1, 2)]
    order += [f"{s}{phase}{m}" for m in range(NUM_MICROBATCHES) for s in (2, 1, 0) for phase in backward]
    names = [str(index) for index in range(len(module))]
    plan = make_plan(names, (2, 4), (0, 0, 0), [order], 16, NUM_MICROBATCHES, recompute)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=(X,), optimizer=sgd(0.1))
    pipeline.step(X, target=Y)
    module.zero_grad()
    held, _ = allocated(lambda: pipeline.step(X, target=Y), torch.device("cpu"))
    assert 0 <= held - sum(parameter.nbytes for parameter in module.parameters()) < ACTIVATION_BYTES
