"""Models of strangers in stages of one process: gradients beside the path to the inputs, and buffers that are assigned."""

import copy
import gc
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

import bapipe
from bapipe.errors import InvalidModel
from bapipe.formats.settings import Settings
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from tests.multiprocess.runtime_cases import make_plan


class Detached(nn.Module):
    """In its second half, weights whose gradients come on paths that meet none to what that half receives."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.side, self.third = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(self.first(x)))
        if self.kind == "all":
            y = y.detach()
        beside = self.side(y.detach() if self.kind == "beside" else y)
        output: Tensor = self.third(y) * beside
        return output


@pytest.mark.parametrize("kind", ["all", "beside", "none"])
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.usefixtures("alone")
def test_gradients_that_miss_all_paths_to_the_inputs_are_not_lost(kind: str, cut: int) -> None:
    torch.manual_seed(0)
    module, x, y = Detached(kind).double(), torch.randn(6, 4).double(), torch.randn(6, 4).double()
    whole = copy.deepcopy(module)
    mse_loss(whole(x), y).backward()
    names = [layer.name for layer in trace(module, [x]).layers]
    order = [f"{action}{m}" for m in range(3) for action in ("0F", "1F", "1I", "0I", "1W", "0W")]
    plan = make_plan(names, (cut,), (0, 0), [order], 2, 3)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=[x], optimizer=sgd(0.0), check=False)
    pipeline.step(x, target=y)
    for name, parameter in pipeline.named_parameters().items():
        found, want = (
            torch.zeros_like(each) if each.grad is None else each.grad
            for each in (parameter, whole.get_parameter(name))
        )
        torch.testing.assert_close(found, want, msg=name)


class Assigning(nn.Module):
    """Its forward assigns three buffers, as observers of values do. It has no children, so it is one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        for name in ("low", "high", "seen"):
            self.register_buffer(name, torch.zeros(4))
        self.low: Tensor
        self.high: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(linear(x, self.weight))
        with torch.no_grad():
            self.low = torch.minimum(self.low, y.amin(0))
            self.high = torch.maximum(self.high, y.amax(0))
            self.seen = self.seen + len(y)
        return y


@pytest.mark.usefixtures("alone")
def test_buffers_that_forwards_assign_keep_their_names() -> None:
    torch.manual_seed(0)
    module, x, y = nn.Sequential(*(Assigning() for _ in range(6))), torch.randn(6, 4), torch.randn(6, 4)
    whole = copy.deepcopy(module)
    names = [layer.name for layer in trace(module, [x]).layers]
    order = [f"{action}{m}" for m in range(3) for action in ("0F", "1F", "1B", "0B")]
    pipeline = Pipeline(
        module, make_plan(names, (3,), (0, 0), [order], 2, 3), loss=mse_loss, inputs=[x], optimizer=sgd(0.0)
    )
    del module
    for _ in range(4):
        gc.collect()  # so that other tensors get the places in memory of those before
        pipeline.step(x, target=y)
        for part in x.chunk(3):
            whole(part)
    found, want = pipeline.state_dict(), whole.state_dict()
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


class Chain(nn.Module):
    """Layers that use the weight of the next one as well as their own."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = linear(self.a(self.z(x)), self.b.weight)
        x = linear(torch.tanh(self.b(x)), self.c.weight)
        output: Tensor = self.d(self.c(torch.tanh(x)))
        return output


def test_layers_in_a_chain_of_shared_weights_stay_together() -> None:
    profile = bapipe.profile(
        Chain(), (torch.randn(2, 4),), torch.randn(2, 4), mse_loss, microbatch_sizes=[2], settings=Settings()
    )
    shares = {layer.name: (set(layer.shares), layer.shared_bytes) for layer in profile.layers}
    assert shares == {
        "z": (set(), 0), "a": ({"b", "c"}, 0), "b": ({"a", "c"}, 0), "c": ({"a", "b"}, 0), "d": (set(), 0),
        "loss": (set(), 0),
    }  # fmt: skip
    assert sum(layer.param_bytes for layer in profile.layers) == 5 * (4 * 4 + 4) * 4
    plan = bapipe.plan(profile, 2, minibatch_size=4, num_stages=2)
    assert [set(stage.layers) & {"a", "b", "c"} for stage in plan.stages] in (
        [{"a", "b", "c"}, set()],
        [set(), {"a", "b", "c"}],
    )


class ReadsTypes(nn.Module):
    """Its code gives tensors the type of others, which is another one under autocast. torch.fx cannot trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.q(x), self.v(x)
        if x.shape[0] < 0:
            return x
        q = (q.float() * 2).to(q.dtype)
        output: Tensor = x + self.o(torch.bmm(q.unsqueeze(1), v.unsqueeze(2)).squeeze(1).expand(-1, 8))
        return output


@pytest.mark.usefixtures("alone", "one_thread")
def test_code_that_reads_types_is_as_fine_under_autocast_and_trains_on_the_same() -> None:
    torch.manual_seed(0)
    module, x, y = nn.Sequential(nn.Linear(8, 8), ReadsTypes(), ReadsTypes()), torch.randn(4, 8), torch.randn(4, 8)
    profiles = [
        bapipe.profile(module, (x,), y, mse_loss, microbatch_sizes=[2], settings=Settings(autocast=autocast))
        for autocast in (None, "bfloat16")
    ]
    exact, narrow = ([layer.name for layer in profile.layers] for profile in profiles)
    assert exact == narrow == ["0", "1.q", "1.v", "1.o", "2.q", "2.v", "2.o", "loss"]
    order = [f"{action}{m}" for m in range(2) for action in ("0F", "1F", "1B", "0B")]
    plan = make_plan(narrow[:-1], (3,), (0, 0), [order], 2, 2)
    plan = replace(plan, settings=Settings(autocast="bfloat16"))
    whole = copy.deepcopy(module)
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse_loss(whole(part).float(), target) / 2
        loss.backward()
    pipeline = Pipeline(
        module, plan, loss=lambda output, target: mse_loss(output.float(), target), inputs=[x], optimizer=sgd(0.0),
        autocast=torch.bfloat16,
    )  # fmt: skip
    pipeline.step(x, target=y)
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=0.02, atol=0.002, msg=name)


class Doubles(torch.autograd.Function):
    """Adds what the modules that it is given make of a tensor, and runs them again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        with torch.no_grad():
            output: Tensor = x + layers[0](x)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (x + ctx.layers[0](x)).backward(grads[0])
        return x.grad, None


class GivesModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Any:
        return Doubles.apply(x, self.layers)


class AssignsInside(nn.Module):
    """Assigns a buffer of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        self.norm.running_mean = 0.9 * self.norm.running_mean  # type: ignore[assignment]
        output: Tensor = self.last(x)
        return output


class HasAlias(nn.Module):
    """A buffer under two names, one of which its forward assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("alias", self.mean)
        self.mean: Tensor
        self.alias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return torch.tanh(self.linear(x)) + 0.1 * self.alias


@pytest.mark.parametrize("part", [GivesModules, AssignsInside, HasAlias])
def test_parts_that_no_graph_can_keep_are_one_layer_with_all_their_parameters(part: type[nn.Module]) -> None:
    module = nn.Sequential(nn.Linear(4, 4), part(), nn.Linear(4, 4)).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    profile = bapipe.profile(
        module, (torch.randn(4, 4),), torch.randn(4, 4), mse_loss, microbatch_sizes=[2], settings=Settings()
    )
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "loss"]
    assert sum(layer.weight_bytes for layer in profile.layers) == sum(p.nbytes for p in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not module.training
    if part is HasAlias:
        assert module[1].mean is module[1].alias


def test_a_model_that_assigns_a_buffer_of_a_part_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"^AssignsInside cannot be traced: its forward assigns .*running_mean"):
        trace(AssignsInside(), (torch.randn(4, 4),))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute", [(), (0,)])
def test_a_buffer_with_two_names_trains_as_in_one_process(recompute: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x, y = nn.Sequential(HasAlias(), HasAlias(), nn.Linear(4, 4)), torch.randn(6, 4), torch.randn(6, 4)
    whole = copy.deepcopy(module)
    names = [layer.name for layer in trace(module, [x]).layers]
    order = [f"{action}{m}" for m in range(3) for action in ("0F", "1F", "1B", "0B")]
    plan = make_plan(names, (2,), (0, 0), [order], 2, 3, recompute)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=[x], optimizer=sgd(0.0), check=False)
    for _ in range(3):
        pipeline.step(x, target=y)
        whole.zero_grad()
        for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
            (mse_loss(whole(part), target) / 3).backward()
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=name)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(pipeline.state_dict()[name], tensor, msg=name)


@pytest.mark.usefixtures("alone")
def test_group_norms_in_channels_last_memory_run_i_and_w_apart() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4), nn.SiLU()]
    module = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = torch.randn(4, 4, 5, 5).double(), torch.randn(4, 4, 3, 3).double()
    whole = copy.deepcopy(module)
    mse_loss(whole(x), y).backward()
    order = [f"{action}{m}" for m in range(2) for action in ("0F", "1F", "1I", "0I", "1W", "0W")]
    plan = make_plan([name for name, _ in module.named_children()], (1,), (0, 0), [order], 2, 2)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=[x], optimizer=sgd(0.0))
    pipeline.step(x, target=y)
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=name)


class Halves(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


@pytest.mark.parametrize("recompute", [(), (0,)])
@pytest.mark.usefixtures("alone")
def test_a_first_layer_may_change_the_input_with_several_forwards_in_flight(recompute: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Halves(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    whole = copy.deepcopy(module)
    mse_loss(whole(x.clone()), y).backward()
    order = [f"{phase}{m}" for phase in ("0F", "1F", "1B", "0B") for m in range(3)]
    plan = make_plan(["0", "1", "2", "3"], (2,), (0, 0), [order], 2, 3, recompute=recompute)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=[x.clone()], optimizer=sgd(0.0))
    pipeline.step(x, target=y)
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=name)
