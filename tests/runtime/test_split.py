"""What a stage receives, loads and passes on; which plans and models are refused; who gets which initial weights."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from bapipe.errors import BapipeError, InvalidModel, InvalidSchedule
from bapipe.formats.plan import Plan
from bapipe.formats.profile import LOSS
from bapipe.formats.settings import Settings
from bapipe.formats.stage_plan import StagePlan
from bapipe.module_state.python_random import global_generator_states, seed_cpu_generators
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.runtime.materialize import drop_others, materialize
from bapipe.runtime.runnable import check_runnable
from bapipe.runtime.split import split
from bapipe.tracing import stages
from bapipe.tracing.captured import Autocast
from bapipe.tracing.layers import trace
from bapipe.tracing.stage_module import stage_module
from bapipe.tracing.stages import Split, at_size, cut_into_stages
from tests.multiprocess.runtime_cases import Permuting, Residual, Tied, TwoInputs, make_plan, named_order


def _plan(module: nn.Module, cuts: tuple[int, ...], layers: list[str] | None = None) -> Plan:
    names = layers or [layer.name for layer in trace(module).layers]
    order = named_order("1f1b", len(cuts) + 1, 2)
    return make_plan(names, cuts, range(len(cuts) + 1), order, 2, 2)


def _split(module: nn.Module, cuts: tuple[int, ...], *inputs: Tensor) -> Split:
    return split(trace(module, inputs), _plan(module, cuts), inputs)


def _materialize(
    parts: Split, stages: Sequence[int], seed: int = 0, initialize: Callable[[nn.Module], None] | None = None
) -> None:
    modules = [stage_module(parts, s) for s in stages]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    materialize(parts, tensors, torch.device("cpu"), seed, initialize)


def test_a_skip_is_relayed_and_a_later_input_is_loaded() -> None:
    parts = _split(TwoInputs(), (2, 3, 4, 5), torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))
    assert [stage.layers for stage in parts.stages] == [("encode", "more"), ("embed",), ("mix",), ("head",), ()]
    assert [stage.received for stage in parts.stages] == [
        (),
        ("more",),
        ("more", "embed"),
        ("mix",),
        ("head",),
    ]
    assert [stage.loaded for stage in parts.stages] == [("target",), ("losses",), ("losses",), (), ()]
    assert parts.stages[-1].outputs == ("head",)
    assert parts.examples["embed"].shape == (2, 8)
    assert all(parts.examples[name].requires_grad for name in ("more", "embed", "mix"))
    assert {example.device.type for example in parts.examples.values()} == {"meta"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_at_a_cut_have_the_types_of_autocast_in_the_model(device: str) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, device=device) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            with torch.autocast("cpu", torch.bfloat16):
                x = self.c(self.b(x))
            return x.float()

    x = torch.randn(2, 4)
    parts = split(trace(Narrow(), [x]), _plan(Narrow(), (1, 2), ["a", "b", "c"]), [x])
    examples = [parts.examples[stage.outputs[0]] for stage in parts.stages]
    assert [example.dtype for example in examples] == [torch.float32, torch.bfloat16, torch.float32]
    assert all(example.is_meta and example.requires_grad for example in examples)
    if device == "cpu":
        for s, example in enumerate(examples):
            (x,) = stage_module(parts, s)(x)
            assert x.dtype == example.dtype


def test_stage_outputs_are_contiguous_and_no_views() -> None:
    module = Permuting()
    first = stage_module(_split(module, (2,), torch.zeros(1, 4, 6)), 0)
    x = torch.randn(2, 4, 6)
    (given,) = first(x)
    want = module.act(module.a(x).permute(0, 2, 1))
    assert torch.equal(given, want)
    assert not want.is_contiguous()
    assert given.is_contiguous()
    assert not given._is_view()
    given.sum().backward()
    gradient = module.a.weight.grad
    assert gradient is not None
    module.zero_grad()
    want.sum().backward()
    assert module.a.weight.grad is not None
    assert torch.equal(gradient, module.a.weight.grad)


def test_an_input_changed_through_a_view_is_copied() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.same, self.relu, self.b = (
                nn.Linear(4, 4),
                nn.Identity(),
                nn.ReLU(inplace=True),
                nn.Linear(4, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.relu(self.same(self.a(x)).view(-1, 4)))

    received = torch.full((2, 4), -1.0, requires_grad=True)
    stage_module(_split(Views(), (1,), torch.zeros(1, 4)), 1)(received)
    assert torch.equal(received, torch.full((2, 4), -1.0))


def test_a_plan_of_other_layers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InvalidModel, match=r"^the plan's layer 'x' is not in the model: run the model"):
        split(trace(model), _plan(model, (1,), ["0", "x"]), [torch.zeros(1, 4)])
    with pytest.raises(InvalidModel, match=r"^the model's layer '1' is in no stage of the plan: run the model"):
        split(trace(model), _plan(model, (1,), ["0"]), [torch.zeros(1, 4)])


def test_a_plan_whose_tensors_flow_backwards_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InvalidModel, match=r"^tensor '0' is made in stage 1 but used by '1' in stage 0: stages must"):
        split(trace(model), _plan(model, (1,), ["1", "0"]), [torch.zeros(1, 4)])


def test_stages_may_share_a_weight() -> None:
    parts = _split(Tied(), (1,), torch.zeros(1, 6))
    assert [(one.name, one.stages) for one in parts.tied] == [("a.weight", (0, 1))]
    assert set(stage_module(parts, 0).state_dict()) == {"a.weight", "a.bias"}
    assert set(stage_module(parts, 1).state_dict()) == {"b.weight", "b.bias", "c.weight", "c.bias"}


def test_a_shared_weight_on_the_meta_device_starts_from_its_first_layer_on_every_stage() -> None:
    def weights(stages: tuple[int, ...]) -> dict[str, Tensor]:
        with torch.device("meta"):
            module = Tied()
        _materialize(_split(module, (1,), torch.zeros(1, 6)), stages)
        return {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}

    first, second, both = weights((0,)), weights((1,)), weights((0, 1))
    assert set(first) == {"a.weight", "a.bias", "b.weight"}
    assert set(second) == {"a.weight", "b.weight", "b.bias", "c.weight", "c.bias"}
    assert all(torch.equal(value, both[name]) for state in (first, second) for name, value in state.items())


def test_stages_that_share_running_statistics_are_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.a(self.norm(x)))

    message = (
        "buffer 'norm.running_mean' is used in stages 0, 1, and training changes it, which the others do not see: "
        "layers that share such a buffer must share a stage, or have modules of their own"
    )
    with pytest.raises(InvalidModel, match=f"^{message}$"):
        _split(Shared(), (1,), torch.zeros(1, 4))


def test_a_size_found_before_a_cut_is_recovered_after_it() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y.repeat(3, 1)).view(y.size(0) * 3 + 0, 2, y.shape[-1] // 2)

    parts = _split(Sized(), (1,), torch.zeros(1, 4))
    assert parts.stages[1].received == ("a",)
    (given,) = stage_module(parts, 1)(torch.zeros(15, 4))
    assert given.shape == (15, 2, 2)


def test_a_size_that_is_no_multiple_of_the_batch_is_refused() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y) * (y.size(0) ** 2)

    with pytest.raises(
        InvalidModel, match=r"^'a:pow_1' is used across a cut but is no tensor but a int: let each layer find"
    ):
        stage_module(_split(Halved(), (1,), torch.zeros(1, 4)), 1)


def test_changing_memory_that_another_stage_reads_is_refused() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            early = y[:, :2]
            z = self.relu(y)
            return self.b(early) + z

    with pytest.raises(InvalidModel, match=r"^layer 'relu' \(stage 0\) changes in place what layer 'b' \(stage 1\)"):
        _split(Late(), (2,), torch.zeros(1, 4))


def test_what_cannot_run_is_refused() -> None:
    plan = _plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (1,))
    layers = [name for stage in plan.stages for name in stage.layers if name != LOSS]
    shared = make_plan(layers, (1,), ((0, 1), 1), [["0F0", "0B0"], ["0F1", "1F0", "1B0", "1F1", "1B1", "0B1"]], 2, 2)
    with pytest.raises(BapipeError) as caught:
        check_runnable(shared)
    assert str(caught.value) == (
        "stages 0 and 1 share only some of their devices: give them the same devices in the same order, or none in common"
    )
    many = make_plan(layers, (1,), (0, (1, 2, 3)), [["0F0"], ["1F0"], [], []], 2, 2)
    with pytest.raises(BapipeError) as caught:
        check_runnable(many)
    assert str(caught.value) == (
        "stage 1 has 3 devices for 2 micro-batches of 2, so some would compute nothing: take smaller micro-batches, a "
        "mini-batch of at least 6, or fewer devices for the stage"
    )
    beside = replace(plan.cluster, devices=tuple(replace(d, side_by_side=True) for d in plan.cluster.devices))
    with pytest.raises(BapipeError) as caught:
        check_runnable(_changed(plan, cluster=beside))
    assert str(caught.value) == (
        f"device '{plan.cluster.devices[0].name}' runs forward and backward side by side, which torch cannot: plan with "
        "a schedule other than fbp-as, or leave side_by_side out of the cluster"
    )
    order = (("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B1", "1B0"))
    with pytest.raises(InvalidSchedule, match=r"^deadlock: each waits for another: rank 0 at 0B0, rank 1 at 1F1$"):
        check_runnable(_changed(plan, order=order))


def _changed(plan: Plan, **fields: object) -> Plan:
    return Plan(**({name: getattr(plan, name) for name in plan.__struct_fields__} | fields))


def test_layers_of_a_stage_materialize_independently_of_other_stages() -> None:
    def weights(cut: int, stages: tuple[int, ...]) -> dict[str, Tensor]:
        with torch.device("meta"):
            module = Residual()
        parts = _split(module, (cut,), torch.zeros(1, 3, 6, 6))
        _materialize(parts, stages, seed=5)
        return {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}

    state = torch.get_rng_state()
    early, late, whole = weights(4, (0,)), weights(4, (1,)), weights(7, (0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert not set(early) & set(late)
    assert set(early) | set(late) == set(whole)
    assert all(torch.equal((early | late)[name], whole[name]) for name in whole)
    assert torch.equal(whole["norm1.running_var"], torch.ones(4))


def test_initialize_overrides_meta_weights_and_real_weights_are_kept() -> None:
    def ones(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(1.0)

    module = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4), nn.Linear(4, 4))
    kept = module[1].weight.clone()
    _materialize(_split(module, (2,), torch.zeros(1, 4)), (0,), initialize=ones)
    assert torch.equal(module[0].weight, torch.ones(4, 4))  # type: ignore[arg-type]
    assert torch.equal(module[1].weight, kept)  # type: ignore[arg-type]
    assert module[2].weight.is_meta


def _drawn_by_python(num: int) -> Tensor:
    return torch.tensor([random.random() for _ in range(num)])


@pytest.mark.parametrize("draw", [torch.rand, lambda num: torch.as_tensor(numpy.random.rand(num)), _drawn_by_python])
def test_initial_weights_are_those_of_the_seed_whatever_generator_a_layer_draws_from(
    draw: Callable[[int], Tensor],
) -> None:
    def drawn(module: nn.Module) -> None:
        module.get_parameter("weight").copy_(draw(4).reshape(2, 2))

    def weights(seed: int) -> Tensor:
        module = nn.Sequential(nn.Linear(2, 2, device="meta"))
        _materialize(_split(module, (), torch.zeros(1, 2)), (0,), seed=seed, initialize=drawn)
        return module[0].get_parameter("weight")

    states = global_generator_states()
    first = weights(5)
    assert global_generator_states() == states
    seed_cpu_generators(1)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)


def test_only_what_a_reset_may_set_is_copied_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the statistics of a norm, which its reset would set; a large table is not held twice."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4, device="meta"), nn.BatchNorm1d(4)
            self.norm.weight = nn.Parameter(torch.empty(4, device="meta"))
            self.register_buffer("table", torch.ones(1000))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.linear(x)) * self.get_buffer("table")[:4]
            return y

    table = Table()
    module = nn.Sequential(table, nn.Linear(4, 4))
    inputs = torch.zeros(1, 4)
    parts = split(trace(module, [inputs], leaf_modules=["0"]), _plan(module, (1,), ["0", "1"]), [inputs])
    mean = table.norm.get_buffer("running_mean").fill_(3.0)
    copied: list[int] = []
    clone = Tensor.clone

    def cloned(tensor: Tensor) -> Tensor:
        copied.append(tensor.numel())
        return clone(tensor)

    monkeypatch.setattr(Tensor, "clone", cloned)
    _materialize(parts, (0, 1))
    assert max(copied) == 4
    assert torch.equal(mean, torch.full((4,), 3.0))
    assert torch.equal(table.norm.weight, torch.ones(4))


def test_what_was_dropped_is_not_initialized_again() -> None:
    """A second pipeline of a module, cut elsewhere, would train new values in place of those on another rank."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _materialize(_split(module, (1,), torch.zeros(1, 4)), (0,))
    _materialize(_split(module, (1,), torch.zeros(1, 4)), (0,))
    with pytest.raises(InvalidModel, match=r"^'1.weight' has no values in this process: an earlier Pipeline"):
        _materialize(_split(module, (1,), torch.zeros(1, 4)), (1,))


def test_a_tied_weight_is_initialized_where_the_rest_of_its_layer_was_dropped() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    parts = _split(module, (1,), torch.zeros(1, 4))
    drop_others(parts, list(stage_module(parts, 1).parameters()))  # as a pipeline does before it gives its own values
    _materialize(parts, (1,))
    assert [name for name, p in module.named_parameters(remove_duplicate=False) if p.is_meta] == ["0.bias"]
    assert bool(module[2].weight.isfinite().all())


def test_a_recurrent_layer_is_materialized_and_dropped() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.head(self.lstm(x)[0])
            return hidden

    with torch.device("meta"):
        module = Reader()
    x = torch.randn(1, 3, 4)
    _materialize(_split(module, (1,), x), (0, 1))
    gates = module.lstm.weight_ih_l0 @ x[0, 0] + module.lstm.bias_ih_l0 + module.lstm.bias_hh_l0
    i, _, g, o = gates.chunk(4)
    first = torch.sigmoid(o) * torch.tanh(torch.sigmoid(i) * torch.tanh(g))
    torch.testing.assert_close(module(x)[0, 0], module.head(first))
    _materialize(_split(module, (1,), x), (1,))
    assert module.lstm.weight_ih_l0.is_meta
    assert not module.head.weight.is_meta


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_parameters_that_an_autograd_graph_holds_keep_their_values() -> None:
    """As those of an old `weight_norm` do: the weight that was computed last is an attribute of the module."""
    normed = nn.utils.weight_norm(nn.Linear(4, 4))
    module = nn.Sequential(normed, nn.Linear(4, 4))
    parts, wanted = _split(module, (1,), torch.zeros(1, 4)), normed.get_parameter("weight_v").clone()
    _materialize(parts, (1,))
    assert torch.equal(normed.get_parameter("weight_v"), wanted)
    assert normed.bias.is_meta


def test_a_constant_that_nothing_sets_is_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.mask

    with torch.device("meta"):
        module = Masked()
    with pytest.raises(InvalidModel, match=r"^buffer 'mask' is on the meta device and neither the layer's reset_"):
        _materialize(_split(module, (1,), torch.zeros(1, 4)), (0,))


class Masked(nn.Module):
    """Has a mask with as many values as features, which its reset sets to the given ones, if any."""

    mask: Tensor

    def __init__(self, dtype: torch.dtype, values: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(2, dtype=dtype))
        self._values = values

    def reset_parameters(self) -> None:
        if self._values:
            self.mask.copy_(torch.tensor(self._values))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


@pytest.mark.parametrize(("dtype", "first"), [(torch.bool, 1), (torch.int8, 77), (torch.int32, 77)])
def test_a_reset_may_set_a_constant_to_any_value(dtype: torch.dtype, first: int) -> None:
    """As a causal mask, which begins with True."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Masked(dtype, (first, 0)))
    _materialize(_split(module, (1,), torch.zeros(1, 2)), (1,))
    assert module.get_buffer("1.mask").tolist() == [first, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float32])
def test_a_constant_that_a_reset_leaves_out_is_refused(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Masked(dtype, ()))
    with pytest.raises(InvalidModel, match=r"^buffer '1\.mask' is on the meta device and neither the layer's reset_"):
        _materialize(_split(module, (1,), torch.zeros(1, 2)), (1,))


def test_the_loss_stays_on_the_last_stage() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = _plan(model, (1,))
    stages = (StagePlan(layers=("0", LOSS), devices=("cpu0",)), StagePlan(layers=("1",), devices=("cpu1",)))
    with pytest.raises(InvalidModel, match=r"^the plan's last stage does not hold the layer 'loss': plan again$"):
        split(trace(model), _changed(plan, stages=stages), [torch.zeros(1, 4)])


def test_under_autocast_a_cut_is_counted_in_the_types_that_are_sent() -> None:
    module = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    inputs, target = (torch.randn(2, 8),), torch.randn(2, 4)
    settings = Settings(autocast="bfloat16")
    loss = nn.functional.mse_loss
    made = measure_model(
        module,
        inputs,
        target,
        loss,
        ProfileOptions(microbatch_sizes=[2], settings=settings, seconds_per_size=0.1),
        name="m",
    )
    profiled = [layer.output_bytes[0] for layer in made.measurements[0].layers[:-1]]
    model = trace(module, inputs)
    stage_of = {layer.name: index for index, layer in enumerate(model.layers)}
    parts = cut_into_stages(model, stage_of, inputs, 2, Autocast("cpu", torch.bfloat16, True))
    sent = [parts.examples[stage.outputs[0]] for stage in parts.stages]
    assert [tensor.dtype for tensor in sent] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]
    assert [tensor.nbytes for tensor in sent] == profiled


def test_types_under_autocast_need_no_pass_on_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take long for a large model, on one thread of a CPU."""
    monkeypatch.setattr(stages, "_run_once", lambda *_: pytest.fail("it ran on values"))
    module, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), torch.randn(2, 8)
    model = trace(module, (x,), autocast=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parts = cut_into_stages(model, {"0": 0, "1": 1, "2": 2}, (x,), 2, Autocast("cpu", torch.bfloat16, True))
    assert [parts.examples[stage.outputs[0]].dtype for stage in parts.stages] == [torch.bfloat16] * 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_types_are_found_on_the_kind_of_device_that_autocast_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model traced on a CPU may turn autocast off for that."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.a(x)
            output: Tensor = self.b(x)
            return output

    asked: list[str] = []
    found = [torch.empty(2, 4)] * 2

    def fake_values(model: Any, names: Any, inputs: Any, size: int, device: torch.device) -> list[Tensor]:
        asked.append(device.type)
        return found

    monkeypatch.setattr(stages, "_fake_values", fake_values)
    x = torch.randn(2, 4)
    for _ in range(5):  # of two kinds in a set, whose order may differ
        model = trace(Narrow(), (x,), autocast=torch.bfloat16)
        cut_into_stages(model, {"a": 0, "b": 1}, (x,), 2, Autocast("cuda", torch.bfloat16, True))
    assert asked == ["cuda"] * 5


class NeedsValues(nn.Module):
    """Reads a value, so that its shapes come from a pass on values, and keeps others in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor
        self.last, self.calls, self.seen = torch.zeros(6), 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.calls += 1
        self.seen.append(y.sum().item())
        with torch.no_grad():
            self.mean.add_(1)
            self.last.add_(y.mean(0))
            self.teacher.weight.add_(1)
        return y + random.random()


@pytest.mark.parametrize("autocast", [None, Autocast("cpu", torch.bfloat16, True)])
def test_a_pass_on_values_needs_no_values_of_the_model(autocast: Autocast | None) -> None:
    """As where every rank makes its own layers only: it gets small ones for this pass."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(self.norm(x))
            return y if y.sum().item() > -1e9 else 2 * y

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 6), Chooses(), nn.Tanh(), nn.Linear(5, 4))
    x = torch.randn(2, 6)
    model = trace(module, (x,), autocast=None if autocast is None else autocast.dtype)
    parts = cut_into_stages(model, {"0": 0, "1": 1, "2": 1, "3": 2}, (x,), 2, autocast)
    sent = [parts.examples[stage.outputs[0]] for stage in parts.stages]
    assert [tuple(tensor.shape) for tensor in sent] == [(2, 6), (2, 5), (2, 4)]
    assert all(tensor.is_meta and tensor.requires_grad for tensor in sent)
    assert {tensor.dtype for tensor in sent} == {torch.float32 if autocast is None else torch.bfloat16}
    assert all(parameter.is_meta for parameter in module.parameters())


def test_errors_of_a_pass_without_values_are_not_written_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """torch writes those of operators that refuse the types of autocast there, before it raises them."""

    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 16, 16))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([1, 2], dtype=torch.int32, device=x.device)
            return torch._grouped_mm(x, self.weight.to(x.dtype), offs=ends)

    x = torch.randn(2, 16)
    model = trace(nn.Sequential(Refuses(), nn.Linear(16, 4)), (x,), autocast=torch.bfloat16)
    with suppress(InvalidModel):  # if values are refused as well
        cut_into_stages(model, {"0": 0, "1": 1}, (x,), 2, Autocast("cpu", torch.bfloat16, True))
    assert "failed while attempting" not in capfd.readouterr().err


def test_a_pass_on_values_leaves_nothing_behind() -> None:
    inner, drawn = NeedsValues(), random.getstate()
    module = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 5))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    _split(module, (1,), torch.ones(2, 6))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (inner.calls, inner.seen, inner.last.tolist()) == (0, [0.0], [0.0] * 6)
    assert random.getstate() == drawn


def test_a_pass_on_values_for_another_size_takes_those_of_the_examples() -> None:
    """As evaluation does for a last micro-batch that is smaller: zeros need not be inputs that the model takes."""

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert (x > 0).all(), "not positive"
            return x.log()

    parts = _split(nn.Sequential(Picky(), nn.Linear(6, 5)), (1,), torch.ones(1, 6))
    assert parts.examples["0"].shape == (2, 6)
    assert at_size(parts, 1)["0"].shape == (1, 6)
