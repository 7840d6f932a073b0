"""Optimizers by name, per stage, and their state by the names of parameters."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn, optim

from bapipe.errors import BapipeError
from bapipe.runtime.clock import CpuClock
from bapipe.runtime.optimizer import TORCH_OPTIMIZERS, StageOptimizers, optimizer_factory, sgd
from bapipe.runtime.optimizer_state import OptimizerState


def make(name: str, **arguments: object) -> optim.Optimizer:
    return optimizer_factory(name, 0.5, arguments)([nn.Parameter(torch.zeros(2, 2))])


def test_names_are_those_of_torch_in_any_case() -> None:
    assert {"sgd", "adam", "adamw", "rmsprop"} <= set(TORCH_OPTIMIZERS)
    assert not {"optimizer", "lbfgs"} & set(TORCH_OPTIMIZERS)
    assert type(make("ADAMW")) is optim.AdamW
    assert make("AdamW", weight_decay=0.25).defaults["weight_decay"] == 0.25
    assert make("adam").defaults["lr"] == 0.5


def test_the_default_of_a_pipeline_has_momentum() -> None:
    assert sgd()([nn.Parameter(torch.zeros(1))]).defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamm", {}, "torch.optim has no optimizer 'adamm'; did you mean 'adam'?"),
        (
            "LBFGS",
            {},
            "optimizer 'LBFGS' runs the model several times per step, which a pipeline does not: want one of adadelta, ",
        ),
        ("adam", {"lr_decay": 1}, "adam cannot be made with lr=0.5 and lr_decay=1: "),
        ("sgd", {"momentum": -1}, "sgd cannot be made with lr=0.5 and momentum=-1: "),
    ],
)
def test_errors(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        optimizer_factory(name, 0.5, arguments)
    assert str(caught.value).startswith(message)


def stages() -> tuple[nn.Linear, nn.Linear, dict[str, nn.Parameter]]:
    """Two stages that share a weight, and their parameters by name."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return first, second, dict(first.named_parameters())


def test_a_shared_parameter_belongs_to_the_first_stage() -> None:
    first, second, _ = stages()
    made = StageOptimizers({0: first, 1: second}, sgd(), CpuClock())
    assert len(made.optimizers) == 1
    before = first.weight.detach().clone()
    first(torch.ones(1, 3)).sum().backward()
    made.step(1)
    assert torch.equal(first.weight, before)
    made.step(0)
    assert not torch.equal(first.weight, before)
    assert [stage for stage, _, _ in made.updates] == [1, 0]
    made.zero_grad()
    assert first.weight.grad is None
    assert made.updates == ()


def test_parameters_that_the_factory_leaves_out_keep_no_gradients() -> None:
    layer = nn.Linear(3, 3)
    made = StageOptimizers({0: layer}, lambda parameters: optim.SGD([p for p in parameters if p.dim() > 1]), CpuClock())
    layer(torch.ones(1, 3)).sum().backward()
    made.zero_grad()
    assert layer.bias.grad is None


def test_a_parameter_that_is_unfrozen_later_is_refused() -> None:
    layer = nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    made = StageOptimizers({0: layer}, sgd(), CpuClock())
    layer.weight.requires_grad_(False)
    made.check_frozen()
    layer.requires_grad_(True)
    with pytest.raises(BapipeError, match=r"^'bias' requires gradients now, but was frozen when the Pipeline was made"):
        made.check_frozen()


def test_state_moves_to_other_stages_by_the_names_of_parameters() -> None:
    first, second, parameters = stages()
    adam = optimizer_factory("adam", 0.1, {})
    made = StageOptimizers({0: first, 1: second}, adam, CpuClock())
    first(torch.ones(1, 3)).sum().backward()
    made.step(0)
    state = made.state(parameters)
    assert set(state["tensors"]) == {
        f"{name}:{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert made.state_bytes() == 2 * (9 + 3) * 4 + 2 * 4
    other, _, same_names = stages()
    restored = StageOptimizers({3: other}, adam, CpuClock())
    restored.load_state(state, same_names)
    loaded = restored.state(same_names)["tensors"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state["tensors"].items())


def test_each_rank_takes_its_own_of_the_states_of_all_ranks_together() -> None:
    layers = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    adam = optimizer_factory("adam", 0.1, {})
    named = [{f"{name}.{part}": p for part, p in layers[name].named_parameters()} for name in "ab"]
    states = []
    for name, parameters in zip("ab", named, strict=True):
        made = StageOptimizers({0: layers[name]}, adam, CpuClock())
        layers[name](torch.ones(1, 2)).sum().backward()
        made.step(0)
        states.append(made.state(parameters))
    a, b = states
    together = OptimizerState(
        tensors={**a["tensors"], **b["tensors"]}, numbers={}, options={**a["options"], **b["options"]}
    )
    restored = StageOptimizers({1: layers["b"]}, adam, CpuClock())
    restored.load_state(together, named[1])
    loaded = restored.state(named[1])
    assert loaded["options"] == b["options"]
    assert loaded["tensors"].keys() == b["tensors"].keys()
    assert all(torch.equal(loaded["tensors"][name], value) for name, value in b["tensors"].items())
    message = (
        "the state is of 'a.bias' and others, and not of 'b.bias', which this rank has: give each rank the states of "
        "all ranks together, or that of its own parameters"
    )
    with pytest.raises(BapipeError, match=f"^{re.escape(message)}$"):
        restored.load_state(a, named[1])
    of_weights = OptimizerState(
        tensors={name: tensor for name, tensor in b["tensors"].items() if name.startswith("b.weight")},
        numbers={},
        options={name: option for name, option in b["options"].items() if name.startswith("b.weight")},
    )
    with pytest.raises(BapipeError, match=r"^the state is of 'b\.weight' and others, and not of 'b\.bias'"):
        restored.load_state(of_weights, named[1])


def test_a_state_with_numbers_of_numpy_is_read_by_torch_load(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    made = StageOptimizers({0: layer}, lambda parameters: optim.Adam(parameters, numpy.float64(0.01)), CpuClock())
    state = made.state(dict(layer.named_parameters()))
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt")["options"]["weight:lr"] == 0.01


def test_state_is_restored_where_the_factory_tells_parameters_apart() -> None:
    layer, made = nn.Linear(3, 3), list[optim.Optimizer]()
    rates = {id(layer.weight): 0.25, id(layer.bias): 0.5}

    def by_layer(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        made.append(optim.AdamW([{"params": [p], "lr": rates[id(p)], "amsgrad": p.dim() > 1} for p in parameters]))
        return made[-1]

    optimizers = StageOptimizers({0: layer}, by_layer, CpuClock())
    layer(torch.ones(1, 3)).sum().backward()
    optimizers.step(0)
    named = dict(layer.named_parameters())
    state = optimizers.state(named)
    optimizers.load_state(state, named)
    assert made == [*optimizers.optimizers]
    assert optimizers.state(named)["tensors"].keys() == state["tensors"].keys()
    others = {name: value for name, value in state["tensors"].items() if "max_exp_avg_sq" not in name}
    with pytest.raises(
        BapipeError, match="the checkpoint has the state of another optimizer: exp_avg, exp_avg_sq, step; "
    ):
        optimizers.load_state(OptimizerState(tensors=others, numbers={}), named)


def test_a_state_of_another_kind_is_refused_and_that_of_other_ranks_left_out() -> None:
    layer = nn.Linear(2, 2)
    optimizers, named = StageOptimizers({0: layer}, sgd(), CpuClock()), dict(layer.named_parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizers.step(0)
    state = optimizers.state(named)
    other = {"elsewhere:momentum_buffer": torch.zeros(3)}
    optimizers.load_state(OptimizerState(tensors={**state["tensors"], **other}, numbers={"elsewhere:step": 1}), named)
    assert optimizers.state(named)["tensors"].keys() == {"weight:momentum_buffer", "bias:momentum_buffer"}
    torchs: Any = optim.SGD(layer.parameters()).state_dict()
    with pytest.raises(
        BapipeError, match=r"^`state` is a dictionary of 'state', 'param_groups': want what `optimizer_st"
    ):
        optimizers.load_state(torchs, named)


def test_several_learning_rates_are_not_made_one() -> None:
    layer = nn.Linear(3, 3)

    def of(*rates: float) -> StageOptimizers:
        def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
            return optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)])

        return StageOptimizers({0: layer}, make, CpuClock())

    same = of(0.5, 0.5)
    same.set_learning_rate(0.25)
    assert {group["lr"] for group in same.optimizers[0].param_groups} == {0.25}
    with pytest.raises(
        BapipeError, match=r"^the groups of parameters that `optimizer` made have learning rates of 0.25, 0.5, .* keep"
    ):
        of(0.5, 0.25).set_learning_rate(1.0)


def with_state(name: str, dtype: torch.dtype = torch.float32) -> tuple[StageOptimizers, dict[str, nn.Parameter]]:
    """Optimizers of a stage after one step."""
    weights = nn.Embedding(5, 3, sparse=name == "sparseadam", dtype=dtype)
    made = StageOptimizers({0: weights}, optimizer_factory(name, 0.1, {}), CpuClock())
    weights(torch.tensor([1, 2])).sum().backward()
    made.step(0)
    return made, dict(weights.named_parameters())


def test_state_that_is_a_plain_number_is_restored_too() -> None:
    made, parameters = with_state("sparseadam")
    state = made.state(parameters)
    assert state["numbers"] == {"weight:step": 1}
    again = StageOptimizers({0: nn.Embedding(5, 3, sparse=True)}, optimizer_factory("sparseadam", 0.1, {}), CpuClock())
    named = {"weight": again.optimizers[0].param_groups[0]["params"][0]}
    again.load_state(state, named)
    assert again.state(named)["numbers"] == state["numbers"]
    assert set(again.state(named)["tensors"]) == {"weight:exp_avg", "weight:exp_avg_sq"}


class Halving(optim.SGD):
    """Keeps a number of its own, with a fraction."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["factor"] = self.state[parameter].get("factor", 1.0) / 2
        return super().step(closure)


def test_state_that_is_a_fraction_is_saved() -> None:
    weights = nn.Linear(2, 1, bias=False)
    made = StageOptimizers({0: weights}, lambda p: Halving(p, lr=0.1), CpuClock())
    weights(torch.ones(1, 2)).sum().backward()
    made.step(0)
    assert made.state(dict(weights.named_parameters()))["numbers"] == {"weight:factor": 0.5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", sorted({*TORCH_OPTIMIZERS} - {"sparseadam"}))
def test_state_is_restored_in_its_own_dtype(name: str, dtype: torch.dtype) -> None:
    made, parameters = with_state(name, dtype)
    saved = {key: tensor.clone() for key, tensor in made.state(parameters)["tensors"].items()}
    made.load_state(OptimizerState(tensors=saved, numbers={}), parameters)
    loaded = made.state(parameters)["tensors"]
    assert {key: tensor.dtype for key, tensor in loaded.items()} == {key: tensor.dtype for key, tensor in saved.items()}
    assert all(torch.equal(loaded[key], tensor) for key, tensor in saved.items())


@pytest.mark.parametrize("name", sorted({*TORCH_OPTIMIZERS} - {"sparseadam"}))
def test_every_optimizer_loads_its_own_state_and_refuses_another_s(name: str) -> None:
    made, parameters = with_state(name)
    state = made.state(parameters)
    made.load_state(state, parameters)
    assert made.state(parameters)["numbers"] == state["numbers"]
    others = OptimizerState(tensors={**state["tensors"], "weight:else": torch.zeros(1)}, numbers=state["numbers"])
    with pytest.raises(
        BapipeError, match=r"^the checkpoint has the state of another optimizer: .*else.*; this one makes "
    ):
        made.load_state(others, parameters)


class Momentum(optim.SGD):
    """Has an option of its own that is in no group."""

    def __init__(self, params: Any, momentum: float = 0.0) -> None:
        super().__init__(params, lr=0.1)
        self.momentum = momentum

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["momentum"] = self.momentum
        return super().step(closure)


def test_an_optimizer_of_ones_own_loads_its_state() -> None:
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    made = StageOptimizers({0: module}, lambda params: Momentum(params, 0.9), CpuClock())
    made.step(0)
    parameters = dict(module.named_parameters())
    state = made.state(parameters)
    assert state["tensors"]
    made.load_state(state, parameters)


@pytest.mark.parametrize("kind", [optim.lr_scheduler.StepLR, optim.lr_scheduler.ExponentialLR])
def test_a_scheduler_goes_on_with_the_rate_that_was_saved(kind: Any) -> None:
    options = {"gamma": 0.5, **({"step_size": 2} if kind is optim.lr_scheduler.StepLR else {})}

    def made() -> tuple[StageOptimizers, Any, dict[str, nn.Parameter]]:
        module = nn.Linear(2, 2)
        optimizers = StageOptimizers({0: module}, lambda p: optim.AdamW(p, lr=0.1, betas=(0.5, 0.6)), CpuClock())
        return optimizers, kind(optimizers.optimizers[0], **options), dict(module.named_parameters())

    def train(
        optimizers: StageOptimizers, scheduler: Any, named: dict[str, nn.Parameter], num_steps: int
    ) -> list[float]:
        rates = []
        for _ in range(num_steps):
            rates.append(optimizers.optimizers[0].param_groups[0]["lr"])
            for parameter in named.values():
                parameter.grad = torch.ones_like(parameter)
            optimizers.step(0)
            scheduler.step()
        return rates

    rates = train(*made(), 6)
    optimizers, scheduler, named = made()
    assert train(optimizers, scheduler, named, 3) == rates[:3]
    state, of_scheduler = optimizers.state(named), scheduler.state_dict()
    assert state["options"]["weight:betas"] == (0.5, 0.6)
    optimizers, scheduler, named = made()
    optimizers.load_state(state, named)
    scheduler.load_state_dict(of_scheduler)
    assert train(optimizers, scheduler, named, 3) == pytest.approx(rates[3:])


def test_an_optimizer_may_have_copies_of_its_own_whose_state_has_no_name() -> None:
    """As those of mixed precision have."""
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    named = dict(module.named_parameters())
    made = StageOptimizers({0: module}, lambda p: optim.SGD([one.detach().float() for one in p], lr=0.1), CpuClock())
    message = (
        r"^the optimizer SGD has 2 parameters that are none of the module, such as one of shape \(2, 2\) and "
        r"torch\.float32: states are saved and loaded by the names of the module's, and these have none\. Let"
    )
    with pytest.raises(BapipeError, match=message):
        made.state(named)
    with pytest.raises(BapipeError, match=message):
        made.load_state(OptimizerState(tensors={}, numbers={}), named)


def test_rates_that_are_tensors_and_options_of_schedulers_are_restored() -> None:
    module = nn.Linear(2, 2)
    named = dict(module.named_parameters())

    def made() -> StageOptimizers:
        return StageOptimizers({0: module}, lambda p: optim.Adam(p, lr=torch.tensor(0.1)), CpuClock())

    optimizers = made()
    optim.lr_scheduler.StepLR(optimizers.optimizers[0], 1)
    optimizers.optimizers[0].param_groups[0]["lr"].fill_(0.01)
    state, again = optimizers.state(named), made()
    again.load_state(state, named)
    (group,) = again.optimizers[0].param_groups
    assert (float(group["lr"]), float(group["initial_lr"])) == pytest.approx((0.01, 0.1))
    assert isinstance(group["lr"], torch.Tensor)


def test_options_of_which_a_group_has_several_stay_as_they_are() -> None:
    module = nn.Linear(2, 2)
    named = dict(module.named_parameters())
    optimizers = StageOptimizers({0: module}, lambda p: optim.SGD(p, lr=0.1), CpuClock())
    options = {"weight:lr": 0.2, "bias:lr": 0.3, "weight:momentum": 0.5, "bias:momentum": 0.5}
    optimizers.load_state(OptimizerState(tensors={}, numbers={}, options=options), named)
    (group,) = optimizers.optimizers[0].param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.1, 0.5, False)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """It would step all of them once for each stage of its rank."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    stages: dict[int, nn.Module] = {0: module[0], 1: module[1]}
    with pytest.raises(BapipeError, match=r"with 2 parameters of other stages, such as one of shape \(2, 3\): each"):
        StageOptimizers(stages, lambda _: optim.SGD(module.parameters(), lr=0.1), CpuClock())
