"""Operators that draw random numbers."""

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from bapipe.errors import InvalidModel
from bapipe.runtime.rng import PerOperatorRng
from bapipe.tracing.layers import trace
from bapipe.tracing.randomness import draws_random_numbers, is_random, runs_other_code
from bapipe.tracing.stage_module import stage_module
from bapipe.tracing.stages import cut_into_stages


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


class Leaf(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("module", "random"),
    [
        (nn.Linear(2, 2), False),
        (nn.Dropout(0.5), True),
        (nn.LSTM(2, 2), False),
        (nn.LSTM(2, 2, 2, dropout=0.1), True),
        (nn.RReLU(), True),
        (nn.AlphaDropout(), True),
        (nn.FractionalMaxPool2d(2, output_size=2), True),
        (nn.MultiheadAttention(2, 1), False),
        (Own(), True),
        (hooked(nn.Linear(2, 2)), True),
    ],
)
def test_modules_are_random_by_their_dropout_unless_they_are_from_outside_torch(
    module: nn.Module, random: bool
) -> None:
    root = nn.Sequential(module)
    traced = fx.GraphModule(root, Leaf().trace(root))
    call = next(node for node in traced.graph.nodes if node.op == "call_module")
    assert is_random(traced, call) is random


@pytest.mark.parametrize(
    "function",
    [
        torch.rand_like, torch.randperm, torch.normal, torch.poisson, torch.binomial, torch.bernoulli, functional.dropout,
        functional.dropout2d, functional.gumbel_softmax, functional.fractional_max_pool2d, functional.rrelu_,
        functional.scaled_dot_product_attention, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_, torch.svd_lowrank,
    ],
)  # fmt: skip
def test_functions_of_torch_that_draw_are_random(function: Callable[..., Any]) -> None:
    assert draws_random_numbers(function)


@pytest.mark.parametrize(
    "function",
    [torch.relu, torch.ones, functional.linear, functional.max_pool2d, functional.interpolate, functional.softmax,
     functional.cross_entropy, functional.layer_norm, functional.batch_norm, Tensor.split, Tensor.__getitem__, torch.einsum],
)  # fmt: skip
def test_other_functions_of_torch_are_not(function: Callable[..., Any]) -> None:
    assert not draws_random_numbers(function)


class Shared(nn.Module):
    """Two layers that use one random tensor, which is made of the input alone."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.noise = nn.Linear(4, 4), nn.Linear(4, 4), noise

    def forward(self, x: Tensor) -> Tensor:
        noise = self.noise(x)
        y: Tensor = self.last(self.first(x) + noise) + noise
        return y


def normal(x: Tensor) -> Tensor:
    return torch.normal(torch.zeros_like(x), 1.0)


def poisson(x: Tensor) -> Tensor:
    return torch.poisson(torch.ones_like(x))


def gumbel(x: Tensor) -> Tensor:
    return functional.gumbel_softmax(x, dim=-1)


def fractional(x: Tensor) -> Tensor:
    images = x[:, None, :, None].expand(-1, 1, -1, 4)
    return functional.fractional_max_pool2d(images, 2, output_size=(2, 2)).flatten(1)


@pytest.mark.parametrize("noise", [normal, poisson, gumbel, fractional])
def test_stages_share_the_numbers_that_one_operator_draws(noise: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(4, 4)
    model = trace(Shared(noise), (x,))
    parts = cut_into_stages(model, {"first": 0, "last": 1}, (x,), 4)
    results: list[Tensor] = []

    def seeded(name: str, _: bool) -> None:
        torch.manual_seed(len(name))

    for seed in (1, 2):
        torch.manual_seed(seed)  # what the rank drew before does not matter
        held: dict[str, Tensor] = {}
        for index, stage in enumerate(parts.stages):
            module = stage_module(parts, index, before_random=seeded)
            outputs = module(*(held[name] for name in stage.received), *(x for _ in stage.loaded))
            held = dict(zip(stage.outputs, outputs, strict=True))
        results += held.values()
    assert torch.equal(*results)
    assert not any(is_random(model.module, node) for node in model.replicated)


@pytest.mark.parametrize(
    "draw", [lambda: torch.normal(0.0, 1.0, (1,)), lambda: torch.poisson(torch.ones(1)) - 1], ids=["normal", "poisson"]
)
def test_a_branch_on_a_random_number_is_refused(draw: Callable[[], Tensor]) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return self.layer(y) if draw() > 0 else y

    for seed in range(4):
        torch.manual_seed(seed)
        with pytest.raises(InvalidModel, match="a random number that it draws decides what it does"):
            trace(Branching(), (torch.rand(2, 4),))


def test_functions_are_random_by_their_names() -> None:
    class Functions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + torch.rand_like(x)

    traced = fx.symbolic_trace(Functions())
    assert [n.name for n in traced.graph.nodes if is_random(traced, n)] == ["rand_like"]


def test_a_variable_around_a_function_may_have_no_value_yet() -> None:
    def draws() -> Any:
        return torch.rand(2) * later

    assert draws_random_numbers(draws)
    later = 2.0


class Hooked(nn.Module):
    """Registers a method of its own as a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y.register_hook(self.look)
        return y

    def look(self, gradient: Tensor) -> None:
        assert gradient is not None


def test_tracing_keeps_no_model() -> None:
    module = Hooked()
    kept = weakref.ref(module)
    trace(module, [torch.ones(2, 2)])
    del module
    gc.collect()
    assert kept() is None


def test_code_from_outside_torch_may_draw_in_python() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), Own(), hooked(nn.Linear(2, 2)), nn.Sequential(nn.ReLU(), Own()))
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name, _ in root.named_children():
        graph.call_module(name, (x,))
    for function in (torch.rand_like, functional.dropout, normal, operator.neg):
        graph.call_function(function, (x,))
    graph.call_method("bernoulli_", (x,))
    graph.output(x)
    other = [node.name for node in graph.nodes if runs_other_code(fx.GraphModule(root, graph), node)]
    assert other == ["_2", "_3", "_4", "normal"]


class Noise(nn.Module):
    """Adds random numbers that its own code seeds, in one of several ways."""

    def __init__(self, how: str, branches: bool) -> None:
        super().__init__()
        self.linear, self.how, self.branches = nn.Linear(4, 4), how, branches
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.shape[0] < 0:  # which torch.fx cannot follow
            return x
        h: Tensor = self.linear(x)
        if self.how == "made":
            return h + torch.randn(4, generator=torch.Generator().manual_seed(5))
        if self.how == "seeded again":
            self.generator.manual_seed(5)
            return h + torch.randn(4, generator=self.generator)
        if self.how == "kept":
            return h + torch.randn(4, generator=self.generator)
        if self.how == "default generator":
            torch.default_generator.manual_seed(5)
            return h + torch.randn(4)
        if self.how == "default generator, for others":
            noisy = h + torch.randn(4)
            torch.default_generator.manual_seed(5)
            return noisy
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return h + torch.randn(4)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("how", ["made", "seeded again", "forked", "default generator"])
def test_a_module_that_seeds_its_random_numbers_is_one_layer_and_draws_these(how: str, branches: bool) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 4), Noise(how, branches), nn.Linear(4, 2)), torch.randn(2, 4)
    model = trace(module, [x])
    assert [layer.name for layer in model.layers] == ["0", "1", "2"]
    assert "generator" in model.leaf_reasons["1"].text or "seeds" in model.leaf_reasons["1"].text
    rng = PerOperatorRng(7, torch.device("cpu"))
    stage = stage_module(cut_into_stages(model, {"0": 0, "1": 0, "2": 0}, (x,), 2), 0, torch.device("cpu"), rng)
    for _ in range(2):
        torch.testing.assert_close(stage(x)[0], module(x))


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("how", ["made", "seeded again", "forked", "default generator"])
def test_a_model_that_seeds_its_random_numbers_in_its_own_forward_is_refused(how: str, branches: bool) -> None:
    with pytest.raises(InvalidModel, match=r"^Noise cannot be traced: its forward .*\(.*line \d+.*put this code into"):
        trace(Noise(how, branches), [torch.randn(2, 4)])


@pytest.mark.parametrize("branches", [False, True])
def test_a_seed_after_a_forwards_last_call_is_noticed(branches: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Noise("default generator, for others", branches), nn.Dropout())
    assert "seeds" in trace(module, [torch.randn(2, 4)]).leaf_reasons["1"].text


@pytest.mark.parametrize("branches", [False, True])
def test_a_generator_that_a_module_keeps_is_used_as_it_is(branches: bool) -> None:
    noise = Noise("kept", branches)
    before = noise.generator.get_state()
    assert [layer.name for layer in trace(noise, [torch.randn(2, 4)]).layers] == ["linear"]
    assert torch.equal(noise.generator.get_state(), before)
