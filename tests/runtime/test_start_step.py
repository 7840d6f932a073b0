"""A step that does not wait for its device, in one process."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.errors import BapipeError
from bapipe.runtime import pipeline as pipeline_module
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from tests.multiprocess.runtime_cases import make_plan

X, Y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def pipelined() -> tuple[Pipeline, nn.Sequential]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    module[2].bias.requires_grad_(False)
    order = [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]]
    plan = make_plan(["0", "1", "2"], (1,), (0, 0), order, 2, 2)
    return Pipeline(module, plan, loss=mse_loss, inputs=(X,), optimizer=sgd(0.1)), module


@pytest.mark.usefixtures("alone")
def test_a_step_that_is_started_is_the_same_step() -> None:
    (one, _), (other, _) = pipelined(), pipelined()
    for _ in range(2):
        loss = one.start_step(X, target=Y)
        assert loss is not None
        assert loss.read() == other.step(X, target=Y)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.usefixtures("alone")
def test_layers_are_frozen_but_not_unfrozen_during_training() -> None:
    pipeline, _ = pipelined()
    pipeline.step(X, target=Y)
    weight = pipeline.named_parameters()["0.weight"].requires_grad_(False)
    frozen = weight.clone()
    pipeline.step(X, target=Y)
    assert torch.equal(weight, frozen)
    weight.requires_grad_(True)
    pipeline.step(X, target=Y)
    assert not torch.equal(weight, frozen)
    pipeline.named_parameters()["2.bias"].requires_grad_(True)
    with pytest.raises(
        BapipeError, match=r"^'2.bias' requires gradients now, but was frozen when the Pipeline was made"
    ):
        pipeline.step(X, target=Y)


@pytest.mark.usefixtures("alone")
def test_an_update_waits_for_the_copy_of_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards may change all the rest, which is copied before the next one."""
    pipeline, _ = pipelined()
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert pipeline.changed_by_forwards() == buffers | {"2.bias"}
    waits: list[tuple[object, dict[str, Tensor]]] = []
    before = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}

    def wait(device: torch.device, event: object) -> None:
        waits.append((event, {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}))

    monkeypatch.setattr("bapipe.runtime.update.wait_on_device", wait)
    pipeline.keep_state_until("copied")
    for _ in range(2):
        pipeline.start_step(X, target=Y)
    assert [event for event, _ in waits] == ["copied", None]  # of the first update alone
    at_wait, after = waits[0][1], pipeline.state_dict()
    changed = {name for name in before if not torch.equal(before[name], at_wait[name])}
    assert changed == buffers
    # The batch norm takes away what the bias before it adds: its gradient is zero but for rounding.
    assert {name for name in before if not torch.equal(at_wait[name], after[name])} - buffers - {"0.bias"} == {
        "0.weight", "1.weight", "1.bias", "2.weight",
    }  # fmt: skip


@pytest.mark.usefixtures("alone")
def test_a_step_without_a_loss_waits_for_the_copies_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with a loss does by reading it; a caller may refill a page-locked buffer then."""
    pipeline, _ = pipelined()
    waited: list[object] = []
    monkeypatch.setattr(pipeline_module, "wait_for_copies", waited.append)
    assert pipeline.step(X, target=Y) is not None
    assert waited == []
    monkeypatch.setattr(Pipeline, "start_step", lambda *_, **__: None)  # as on a rank of the first stage
    monkeypatch.setattr(pipeline, "_copy_stream", "copies")
    assert pipeline.step(X, target=Y) is None
    assert waited == ["copies"]


class Limited(nn.Module):
    """Forwards scale rows of two embeddings, and set a row of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 3, max_norm=0.5)
        self.bags = nn.EmbeddingBag(8, 3, max_norm=0.5)
        self.padded, self.head = Padded(8, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x).mean(1) + self.bags(x) + self.padded(x).mean(1))


class Padded(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[0] = 0
        return super().forward(x)


@pytest.mark.usefixtures("alone")
def test_weights_that_forwards_change_are_copied_before_the_next_forward() -> None:
    """Else a checkpoint would hold what the evaluation after it, or the next step, has made of them."""
    order = [["0F0", "0B0", "0F1", "0B1"]]
    tokens = torch.arange(8).reshape(4, 2)
    plan = make_plan(["rows", "bags", "padded", "head"], (), (0,), order, 2, 2)
    pipeline = Pipeline(Limited(), plan, loss=mse_loss, inputs=(tokens,), optimizer=sgd(0.1))
    assert pipeline.changed_by_forwards() == set()
    pipeline.step(tokens, target=Y.float())
    assert pipeline.changed_by_forwards() == {"rows.weight", "bags.weight", "padded.weight"}
