"""How ranks build a model: parameters hold no values where layers can draw their own, and all values come out right."""

import random
from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.module_state.python_random import seed_cpu_generators
from bapipe.runtime.materialize import materialize
from bapipe.runtime.split import split
from bapipe.tracing.layers import trace
from bapipe.tracing.stage_module import stage_module
from bapipe.training.build import ModelBuild, model_build
from bapipe.zoo import ZOO
from bapipe.zoo.example import Example
from tests.models.small_zoo import SMALL
from tests.multiprocess.runtime_cases import make_plan, named_order

HERE = "tests.training.test_build"
Initialize = Callable[[nn.Module], None]


class Rotating(nn.Module):
    """Rotates features by angles computed when it is made, as rotary position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(4) / 7, persistent=False)
        self.scale = torch.tensor(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.angles.cos() * self.scale


class Scaled(nn.Module):
    """A parameter with values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class HalfReset(Scaled):
    """Its `reset_parameters` sets only some of its values."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale[:2].fill_(1.0)


def small_normal(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)


def example(module: nn.Module, initialize: Initialize | None = None) -> Example:
    inputs = (torch.randn(2, 4),)
    target = torch.zeros(2, dtype=torch.int64)
    return Example(module=module, inputs=inputs, target=target, loss=cross_entropy, initialize=initialize)


def plain() -> Example:
    return example(nn.Sequential(nn.Linear(4, 4), Rotating()))


def tied() -> Example:
    module = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return example(module)


def attention() -> Example:
    return example(nn.ModuleList([nn.MultiheadAttention(4, 2), nn.Embedding(5, 4, padding_idx=0), nn.BatchNorm1d(4)]))


def by_initialize() -> Example:
    return example(nn.Sequential(nn.Linear(4, 4)), small_normal)


def applied() -> Example:
    return example(nn.Sequential(nn.Linear(4, 4)).apply(small_normal), small_normal)


def set_in_the_model() -> Example:
    return example(nn.Sequential(nn.Linear(4, 4)).apply(small_normal))


def copied() -> Example:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].load_state_dict(module[0].state_dict())
    return example(module)


def trained_before() -> Example:
    module = nn.Sequential(nn.Linear(4, 4)).apply(small_normal)
    module[0].load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)})
    return example(module, small_normal)


def with_scale() -> Example:
    return example(nn.Sequential(nn.Linear(4, 4), Scaled()))


def half_reset() -> Example:
    return example(nn.Sequential(HalfReset()))


def normalized() -> Example:
    return example(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))))


def buffer_of_a_parameter() -> Example:
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_buffer("mean", module[0].weight.detach().mean(0))
    return example(module)


def reads_a_value() -> Example:
    module = nn.Sequential(nn.Linear(4, 4))
    if module[0].weight.abs().max() > 1:
        raise AssertionError
    return example(module)


def masked() -> Example:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].weight.register_hook(partial(torch.mul, module[0].weight.detach() > 0))
    return example(module)


def llama() -> Example:
    config = transformers.LlamaConfig(
        vocab_size=19, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    words = torch.arange(10).reshape(2, 5)
    return Example(module=transformers.LlamaForCausalLM(config), inputs=(words,), target=words, loss=of_words)


def of_words(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def fails() -> Example:
    raise ValueError("no such size")


def build_of(name: str, seed: int = 3) -> tuple[ModelBuild, Example]:
    return model_build(f"{HERE}:{name}", {}, seed)


def one_stage(made: Example, seed: int = 3) -> nn.Module:
    """The stage of a rank that has all layers; it returns a tuple."""
    inputs = made.tensors
    model = trace(made.module, inputs)
    plan: Plan = make_plan([layer.name for layer in model.layers], (), (0,), named_order("gpipe", 1, 1), 2, 1)
    parts = split(model, plan, inputs)
    stage = stage_module(parts, 0)
    materialize(parts, [*stage.parameters(), *stage.buffers()], torch.device("cpu"), seed, made.initialize)
    return stage


@pytest.mark.parametrize("name", ["plain", "tied", "attention", "by_initialize", "applied"])
def test_layers_that_draw_their_own_values_are_built_without(name: str) -> None:
    build, made = build_of(name)
    assert build.without_values
    assert all(p.is_meta for p in made.module.parameters())
    assert not any(b.is_meta for b in (*made.module.buffers(), *made.inputs, made.target))
    assert all(p.is_meta for p in build().module.parameters())


@pytest.mark.parametrize("name", sorted(ZOO))
def test_models_of_the_zoo_are_built_without_values(name: str) -> None:
    build, made = model_build(ZOO[name], SMALL[name], 0)
    assert build.without_values
    assert all(p.is_meta for p in made.module.parameters())


@pytest.mark.parametrize(
    "name",
    ["set_in_the_model", "copied", "trained_before", "with_scale", "half_reset", "normalized",
     "buffer_of_a_parameter", "reads_a_value", "masked", "llama"],
)  # fmt: skip
def test_all_other_models_are_built_as_they_are(name: str) -> None:
    build, made = build_of(name)
    assert not build.without_values
    torch.manual_seed(8)
    state, again = made.module.state_dict(), build().module.state_dict()
    assert state
    for key, value in state.items():
        assert not value.is_meta, key
        assert torch.equal(value, again[key]), key  # each rank draws the same
    other = build_of(name, seed=4)[0]().module.state_dict()
    assert name in ("with_scale", "half_reset", "trained_before") or any(
        not torch.equal(state[key], other[key]) for key in state
    )


def test_buffers_and_constants_keep_the_values_that_the_factory_computed() -> None:
    x = torch.randn(2, 4)
    made = build_of("plain")[0]()
    stage = one_stage(made)
    first, second = made.module.children()
    want = second.linear(first(x)) * torch.cos(torch.arange(4) / 7) * 3
    assert torch.equal(stage(x)[0], want)
    assert all(0 < p.abs().max() < 0.5 for p in made.module.parameters())  # uniform(-1/2, 1/2), as nn.Linear draws them


class Undecayed(nn.Parameter):
    """As optimizer factories tell parameters apart."""


def triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def test_parameters_that_get_values_keep_their_class_attributes_and_hooks() -> None:
    layer = nn.Linear(4, 4, device="meta")
    layer.weight = Undecayed(layer.weight)
    layer.bias.learning_rate = 0.5  # type: ignore[attr-defined]
    layer.weight.register_hook(torch.zeros_like)
    layer.bias.register_post_accumulate_grad_hook(triple)
    one_stage(example(nn.Sequential(layer)))(torch.ones(2, 4))[0].sum().backward()
    assert type(layer.weight) is Undecayed
    assert vars(layer.bias) == {"learning_rate": 0.5}
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [6, 6, 6, 6]


def shuffled() -> Example:
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_buffer("order", torch.tensor([*numpy.random.permutation(99), *random.sample(range(99), 99)]))
    return example(module)


def test_numbers_of_python_and_numpy_are_the_same_in_each_rank() -> None:
    build, made = build_of("shuffled")
    again, other = build(), build_of("shuffled", seed=4)[0]()
    assert torch.equal(made.module.get_buffer("order"), again.module.get_buffer("order"))
    assert not torch.equal(made.module.get_buffer("order"), other.module.get_buffer("order"))


def test_tied_parameters_stay_tied() -> None:
    made = build_of("tied")[1]
    first, _, last = made.module.children()
    assert last.get_parameter("weight") is first.get_parameter("weight")


def test_a_transformer_of_hugging_face_computes_what_the_original_does() -> None:
    build, made = build_of("llama")
    torch.manual_seed(3)
    original = llama().module
    (words,) = made.tensors
    with torch.no_grad():
        assert torch.equal(one_stage(build())(words)[0], original(words).logits)
    weight = made.module.get_parameter("lm_head.weight")
    assert weight.std().item() == pytest.approx(0.02, rel=0.2)  # not torch's own 0.2


def test_an_error_of_the_factory_is_reported_once_and_as_it_is() -> None:
    with pytest.raises(
        InvalidModel, match=rf"^factory '{HERE}:fails' failed: \S*test_build.py:\d+: ValueError: no such size$"
    ):
        build_of("fails")


def test_random_numbers_outside_stay_as_they_were() -> None:
    def drawn() -> list[float]:
        return [torch.rand(1).item(), random.random(), numpy.random.rand()]

    seed_cpu_generators(1)
    want = drawn()
    seed_cpu_generators(1)
    build_of("shuffled")[0]()
    assert drawn() == want


def _with_a_frozen_loss() -> Example:
    scale = nn.Linear(2, 2).requires_grad_(False)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.scale(output), target)

    return Example(module=nn.Linear(2, 2), inputs=(torch.zeros(1, 2),), target=torch.zeros(1, 2), loss=Scaled())


def test_parameters_of_a_loss_have_values() -> None:
    build, example = model_build(_with_a_frozen_loss, {}, 0)
    assert isinstance(example.loss, nn.Module)
    assert not any(parameter.is_meta for parameter in example.loss.parameters())
    assert not build.without_values
