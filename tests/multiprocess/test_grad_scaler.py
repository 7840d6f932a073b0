"""In float16 losses are scaled, by one factor on all ranks, as torch's GradScaler does in one process."""

import math
import socket
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from bapipe.formats.settings import Settings
from bapipe.runtime.grad_scaler import GROWTH_INTERVAL, GradScalerState, unscale
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.training.checkpoint.folder import list_checkpoints
from bapipe.training.checkpoint.manifest import read_manifest
from bapipe.training.launch.processes import launch
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import TrainResult
from tests.multiprocess.grad_scaler_cases import STEPS, run
from tests.multiprocess.launch_cases import clusters, small
from tests.multiprocess.runtime_cases import make_plan


def test_training_equals_one_process() -> None:
    results = launch(run, ["cpu0", "cpu1"], timeout_s=60)
    for outcomes, checks in results:
        for outcome in outcomes:
            assert outcome.factors == outcome.wanted
            assert outcome.factors[0] == 32_768.0  # the first is too large
            assert len(set(outcome.factors)) < STEPS  # and later ones are not
            assert outcome.loss < 1e-6
            assert outcome.parameter < 1e-6
        assert [finite for finite, _ in checks] == [False, False, True]
        assert checks[2][1] == 2.0


@pytest.mark.usefixtures("alone")
def test_a_loss_in_float16_does_not_overflow_when_it_is_scaled() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target.to(output.dtype)).square().mean()

    layer, x = nn.Linear(2, 2), torch.ones(4, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(nn.Sequential(layer), plan, loss=loss, inputs=[x], optimizer=sgd(0.0), autocast=torch.float16)
    # In the first step a gradient in float16 overflows, as with torch's GradScaler, which halves the scale, too.
    assert [pipeline.step(x, target=torch.full((4, 2), 3.0)) for _ in range(2)] == [9.0, 9.0]
    assert pipeline.grad_scaler == GradScalerState(scale=32_768.0, growth_tracker=1)
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [-3.0, -3.0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("values", "finite"), [([2.0, 6.0], True), ([2.0, math.inf], False), ([3e38, 3e38], False)])
def test_sparse_gradients_are_unscaled(values: list[float], finite: bool) -> None:
    """Both values are of row 0; the last two are finite, and their sum is not."""
    gradient = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor(values).unsqueeze(1), check_invariants=True)
    assert unscale([gradient], 1.0 if values[0] > 1e38 else 4.0, torch.device("cpu"), None) == finite
    if finite:
        assert gradient.to_dense().tolist() == [[2.0]]  # (2 + 6) / 4


class Centred(nn.Module):
    """Subtracts a running mean that is not in state dicts."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        y: Tensor = self.linear(x - self.mean)
        return y


@pytest.mark.usefixtures("alone")
def test_a_loop_that_saves_what_the_documentation_says_goes_on_bit_by_bit(tmp_path: Path) -> None:
    def built() -> Pipeline:
        torch.manual_seed(0)
        plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
        made, batch = nn.Sequential(Centred()), torch.ones(4, 2)
        loss = nn.functional.mse_loss
        return Pipeline(made, plan, loss=loss, inputs=[batch], optimizer=sgd(0.1), autocast=torch.float16, check=False)

    inputs, target = torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(1)), torch.full((4, 2), 9.0)
    whole, first, second = built(), built(), built()
    losses = [whole.step(x, target=target) for x in inputs]
    for x in inputs[:4]:
        first.step(x, target=target)
    saved = {
        "model": first.state_dict(),
        "buffers": first.non_persistent_buffers(),
        "optimizer": first.optimizer_state(),
    }
    torch.save(saved, tmp_path / "0.pt")
    loaded = torch.load(tmp_path / "0.pt")
    with torch.no_grad():
        for part, own in (("model", second.state_dict()), ("buffers", second.non_persistent_buffers())):
            for name, tensor in own.items():
                tensor.copy_(loaded[part][name])
    second.load_optimizer_state(loaded["optimizer"])
    second.start_at(4)
    assert second.grad_scaler == first.grad_scaler
    assert first.grad_scaler != GradScalerState(growth_tracker=4)  # it has been too large
    assert [second.step(x, target=target) for x in inputs[4:]] == losses[4:]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor)


def test_a_manifest_keeps_the_names_of_older_checkpoints() -> None:
    stored = b'{"factor":8.0,"good_steps":3}'
    state = GradScalerState(scale=8.0, growth_tracker=3)
    assert msgspec.json.decode(stored, type=GradScalerState) == state
    assert msgspec.json.encode(state) == stored


def test_the_scale_grows_after_many_steps_with_finite_gradients() -> None:
    state = GradScalerState(scale=8.0)
    for _ in range(GROWTH_INTERVAL - 1):
        state = state.after_step(True)
    assert state == GradScalerState(scale=8.0, growth_tracker=GROWTH_INTERVAL - 1)
    assert state.after_step(False) == GradScalerState(scale=4.0)
    assert state.after_step(True) == GradScalerState(scale=16.0)


def test_a_resumed_run_continues_with_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    order = [[*(f"0F{m}" for m in range(2)), *(f"0B{m}" for m in range(2))]]
    plan = make_plan(["0", "1", "2", "3", "4"], (), (0,), order, 4, 2)
    plan = msgspec.structs.replace(plan, settings=Settings(autocast="float16"))

    def go(folder: str, steps: int) -> TrainResult:
        config = TrainConfig(steps=steps, learning_rate=0.1, checkpoint=tmp_path / folder, resume=True)
        return train(plan, small, clusters(), config)

    alone = go("alone", 6)
    begun, resumed = go("two", 3), go("two", 6)
    assert (*begun.losses, *resumed.losses) == alone.losses
    for folder in ("alone", "two"):
        assert read_manifest(list_checkpoints(tmp_path / folder)[-1]).grad_scaler == GradScalerState(growth_tracker=6)
