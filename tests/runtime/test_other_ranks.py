"""Parameters of other ranks have no values, and whatever needs some is refused."""

import copy
from collections.abc import Callable
from io import BytesIO

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.runtime.materialize import drop_others
from bapipe.runtime.split import split
from bapipe.tracing.layers import trace
from tests.multiprocess.runtime_cases import make_plan


@pytest.fixture
def module() -> nn.Sequential:
    """Of which this process has the first layer only."""
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    plan = make_plan(["0", "1"], (1,), (0, 1), [["0F0", "0B0"], ["1F0", "1B0"]], 2, 1)
    inputs = [torch.randn(2, 2)]
    drop_others(split(trace(made, inputs), plan, inputs), list(made[0].parameters()))
    return made


STEPS = torch.linspace(0.5, 1.5, 3)


class ReadsGlobal(nn.Module):
    """Its second layer reads a global, which is the user's, and a tensor of its own, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.offset = nn.Linear(2, 3), nn.Linear(3, 3), torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x) * STEPS) + self.offset
        return y


def test_a_global_that_only_other_stages_read_keeps_its_values() -> None:
    """The loss, the data or another model may read it in this process."""
    made, inputs = ReadsGlobal(), [torch.randn(2, 2)]
    plan = make_plan(["first", "second"], (1,), (0, 1), [["0F0", "0B0"], ["1F0", "1B0"]], 2, 1)
    parts = split(trace(made, inputs), plan, inputs)
    drop_others(parts, [made.second.weight])
    assert STEPS.tolist() == [0.5, 1.0, 1.5]
    assert made.first.weight.is_meta
    assert made.offset.is_meta
    assert not made.second.weight.is_meta


def average(kept: Tensor, trained: Tensor) -> None:
    kept.detach().mul_(0.9).add_((1 - 0.1) * trained.detach().data)


@pytest.mark.parametrize(
    "use",
    [
        average,
        lambda kept, trained: kept.data.copy_(trained.data),
        lambda kept, trained: torch._foreach_add_([kept.data], [trained]),
        lambda kept, trained: torch.save({"weight": trained.detach()}, BytesIO()),
    ],
)
@pytest.mark.parametrize("name", ["1.weight", "1.running_mean"])
def test_uses_of_values_are_refused(module: nn.Module, use: Callable[[Tensor, Tensor], object], name: str) -> None:
    with pytest.raises(BapipeError, match=rf"^the values of '{name}' are on another rank of the pipeline: use"):
        use(torch.ones(3), module.state_dict(keep_vars=True)[name])


def test_a_file_of_all_weights_is_refused(module: nn.Module) -> None:
    with pytest.raises(BapipeError, match=r"^the values of '1.weight' are on another rank"):
        torch.save(module.state_dict(), BytesIO())


@pytest.mark.filterwarnings("ignore:for 1:UserWarning")  # torch says that nothing is copied into these
def test_of_all_weights_those_of_this_rank_are_loaded(module: nn.Sequential) -> None:
    state = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    module.load_state_dict(state)
    assert torch.equal(module.state_dict()["0.weight"], state["0.weight"])
    assert module[1].weight.is_meta
    module.load_state_dict({name: state[name] for name in ("0.weight", "0.bias")}, strict=False)


def test_what_is_known_without_values_may_be_read(module: nn.Sequential) -> None:
    own, other = module[0].weight, module[1].weight
    assert isinstance(other, nn.Parameter)
    assert isinstance(own, nn.Parameter)
    assert (other.shape, other.dtype, other.device.type, other.requires_grad) == ((3,), torch.float32, "meta", True)
    assert sum(parameter.numel() for parameter in module.parameters()) == 6 + 3 + 3 + 3
    assert [name for name, _ in module.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert other.grad is None
    assert (own * 2).sum() == 2 * own.sum()
    copied = copy.deepcopy(module)
    assert copied[1].weight is not other
    with pytest.raises(BapipeError, match=r"'1.weight' are on another rank"):
        torch.ones(3) + copied[1].weight
    other.requires_grad_(False)
    assert not other.requires_grad
