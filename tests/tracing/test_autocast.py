"""Models whose code asks whether autocast is on, to turn it off for a part."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.errors import InvalidModel
from bapipe.profiler.instrument import InstrumentedModel, TrainingPass
from bapipe.tracing.captured import AUTOCAST, Autocast, autocast_everywhere, autocast_modes
from bapipe.tracing.extract import extract
from bapipe.tracing.layers import trace
from bapipe.tracing.model import TracedModel
from bapipe.tracing.stages import cut_into_stages

BFLOAT16 = torch.bfloat16


class Turned(nn.Module):
    """Turns what a layer returns by angles that bfloat16 would round by more than a whole turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        kind = y.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            positions = torch.arange(1000, 1000 + y.shape[1], device=y.device).float()
            angles = positions[:, None] @ torch.full((1, 4), 1.001, device=y.device)
        output: Tensor = self.second(y * angles.cos())
        return output


def traced(autocast: torch.dtype | None) -> tuple[Turned, TracedModel, Tensor]:
    torch.manual_seed(0)
    module, x = Turned(), torch.randn(3, 7, 4)
    return module, trace(module, (x,), autocast=autocast), x


def whole(model: TracedModel, device: torch.device | None = None) -> torch.fx.GraphModule:
    return extract(model, [layer.name for layer in model.layers], model.inputs, model.outputs, device=device)


def test_a_part_without_autocast_stays_so_in_stages() -> None:
    module, model, x = traced(BFLOAT16)
    with torch.autocast("cpu", BFLOAT16):
        assert torch.equal(whole(model)(x)[0], module(x))
    torch.testing.assert_close(whole(model)(x)[0], module(x))  # without autocast, it is off as before


def test_what_was_traced_without_autocast_does_not_turn_it_off() -> None:
    """Which is why the mode of training is an argument."""
    module, model, x = traced(None)
    assert not any(AUTOCAST in node.meta for node in model.module.graph.nodes)
    with torch.autocast("cpu", BFLOAT16):
        assert not torch.allclose(whole(model)(x)[0].float(), module(x).float(), atol=0.05)


@pytest.mark.parametrize(("device", "kind"), [(None, "cpu"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_on_a_gpu_autocast_is_turned_off_for_the_gpu(device: str | None, kind: str) -> None:
    _, model, _ = traced(BFLOAT16)
    graph = whole(model, None if device is None else torch.device(device)).graph
    entered = [node.args for node in graph.nodes if getattr(node.target, "__name__", "") == "_enter_autocast"]
    assert entered
    assert all(args == (kind, BFLOAT16, False) for args in entered)


class Picked(nn.Module):
    """A layer whose code reads values, which tensors without values do not have."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.sum(1) > -1e9).nonzero().flatten()
        return torch.zeros_like(x).index_add(0, rows, x[rows])


class PickedInFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.picked, self.second = nn.Linear(4, 4), Picked(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            y = self.picked(y.float())
        output: Tensor = self.second(y)
        return output


def nesting() -> int:
    """Returns in how many contexts of torch.autocast this is."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def test_a_graph_that_raises_leaves_its_modes() -> None:
    """Else every later autocast of the process computes with the weights that the first one has cast."""
    model = trace(PickedInFloat32(), (torch.randn(3, 4),), autocast=BFLOAT16)
    with torch.autocast("cpu", BFLOAT16):
        with pytest.raises(RuntimeError):
            whole(model)(torch.randn(3, 5))
        assert nesting() == 1
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError):  # inside of the layer, without gradients and autocast
            whole(model).to("meta")(torch.randn(3, 4, device="meta"))
        assert (nesting(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()) == (1, True, True)
    assert nesting() == 0


def test_code_that_reads_values_under_autocast_is_cut_into_stages() -> None:
    """Its shapes are found by a pass without values, which raises, and then by one with values."""
    x = torch.randn(4, 4)
    model = trace(PickedInFloat32(), (x,), autocast=BFLOAT16)
    names = [layer.name for layer in model.layers]
    stages = {name: int(name == "second") for name in names}
    parts = cut_into_stages(model, stages, (x,), 2, Autocast("cpu", BFLOAT16, True))
    assert nesting() == 0
    assert [parts.examples[name].dtype for name in parts.stages[0].outputs] == [torch.float32]


def test_a_training_pass_that_raises_leaves_its_modes() -> None:
    x = torch.randn(4, 4)
    model = trace(PickedInFloat32(), (x,), autocast=BFLOAT16)
    training_pass = TrainingPass(model=model, loss=mse_loss, inputs=(x,), target=x, autocast=BFLOAT16)
    instrumented = InstrumentedModel(training_pass=training_pass, enter=lambda layer: None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Picked, "forward", lambda self, x: x @ x.new_ones(3, 3))
        with pytest.raises(InvalidModel, match=r"^layer 'picked' failed in its forward"):
            instrumented.forward()
    assert (nesting(), torch.is_grad_enabled()) == (0, True)


def test_autocast_is_on_for_every_device_and_then_as_before() -> None:
    before, cached = autocast_modes(), torch.is_autocast_cache_enabled()
    with autocast_everywhere(torch.float16):
        assert autocast_modes() == {kind: Autocast(kind, torch.float16, True) for kind in ("cpu", "cuda")}
        with autocast_everywhere(None):
            assert not any(mode.enabled for mode in autocast_modes().values())
        assert all(mode.enabled for mode in autocast_modes().values())
    assert (autocast_modes(), torch.is_autocast_cache_enabled()) == (before, cached)
