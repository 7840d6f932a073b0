"""A pipeline whose stages would not train as its module does is refused on every rank, and none of them waits."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bapipe.errors import InvalidModel
from bapipe.runtime import stage_check
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.split import split
from bapipe.tracing import trace
from tests.multiprocess.runtime_cases import Residual, make_plan

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
ORDER = [["0F0", "1F0", "1B0", "0B0"]]


class Detaches(nn.Module):
    """Its stages lose the gradient of a, once the cut is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


def build(module: nn.Module, **options: Any) -> Pipeline:
    return Pipeline(module, make_plan(["a", "b"], (1,), (0, 0), ORDER, 2, 1), loss=cross_entropy, inputs=[X], **options)


def break_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None for _ in grads)

    monkeypatch.setattr("bapipe.tracing.stage_module._Seal.backward", staticmethod(lost))


@pytest.mark.usefixtures("alone")
def test_stages_that_lose_a_gradient_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    break_stages(monkeypatch)
    with pytest.raises(
        InvalidModel, match=r"^the stages would not train as the module does: the gradient of 'a\.bias' is missing"
    ):
        build(Detaches())
    assert build(Detaches(), check=False).stages
    with torch.device("meta"):
        module = Detaches()
    assert build(module).stages  # nothing to compare with


@pytest.mark.usefixtures("alone")
def test_a_module_is_afterwards_as_it_was() -> None:
    module = Residual()
    x = torch.randn(2, 3, 6, 6)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = trace(module, [x])
    plan = make_plan([layer.name for layer in model.layers], (3,), (0, 0), ORDER, 2, 1)
    stage_check.check_stages_equal(split(model, plan, [x]), [x], 2, None)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_other_ranks_hear_of_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, as threads of this process: the second compares nothing."""
    break_stages(monkeypatch)
    said: list[str | None] = [None]
    ready = threading.Event()
    rank = threading.local()

    def broadcast(values: list[str | None], **_: Any) -> None:
        if rank.index == 0:
            said[:] = values
            ready.set()
        else:
            assert ready.wait(60)
            values[:] = said

    monkeypatch.setattr(dist, "get_rank", lambda group: rank.index)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    model = trace(Detaches(), [X])
    parts = split(model, make_plan(["a", "b"], (1,), (0, 0), ORDER, 2, 1), [X])
    errors = {}

    def check(index: int) -> None:
        rank.index = index
        with pytest.raises(InvalidModel) as error:
            stage_check.check_stages_equal(parts, [X], 2, None)
        errors[index] = str(error.value)

    threads = [threading.Thread(target=check, args=(index,)) for index in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors[0] == errors[1]
