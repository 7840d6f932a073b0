"""The bytes that a recomputing stage keeps from F to its backward and from its second forward, and whom it asks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from bapipe.module_state.code_state import ForwardCode
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.runtime.recompute import RecomputedStage
from bapipe.runtime.recompute_layers import PartlyRecomputedStage
from bapipe.runtime.rng import PerOperatorRng
from bapipe.runtime.state_owners import StateOwners
from bapipe.simulator.cuts import kept_tensor_bytes
from bapipe.tracing.layers import trace
from bapipe.tracing.stage_module import stage_module
from bapipe.tracing.stage_parts import stage_parts
from bapipe.tracing.stages import cut_into_stages


@contextmanager
def saved_beside(module: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd saves within the context, except the module's parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    found: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage takes the place of another

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor)
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def test_a_stage_that_recomputes_keeps_its_input_until_its_second_forward_keeps_all() -> None:
    module = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 5))
    made = measure_model(
        module,
        (torch.randn(1, 6),),
        torch.zeros(1, dtype=torch.int64),
        functional.cross_entropy,
        ProfileOptions(microbatch_sizes=(4,), seconds_per_size=0.0),
        name="small",
    )
    stash = [m.stash_bytes for m in made.measurements[0].layers[:3]]
    assert stash == [4 * 4 * 6, 4 * 4 * 7, 4 * 4 * 7]  # the stage's input; a mask; what dropout gives
    stage, x = RecomputedStage(module.train(), torch.device("cpu")), torch.randn(4, 6, requires_grad=True)
    with saved_beside(module) as first:
        y = stage.first(0, lambda: stage(x))
    assert not first
    with saved_beside(module) as second, stage.recomputing(0):
        again = stage(x)
    assert torch.equal(y, again)
    assert sum(second.values()) == sum(stash)
    assert second[x.untyped_storage().data_ptr()] == stash[0]


def test_a_stage_that_recomputes_some_layers_keeps_no_more_than_the_simulator_counts() -> None:
    """Layers 1, 2 and 4 are recomputed. ReLU (3) saves its output, which the profile does not tell from its input."""
    module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 5)).train()
    made = measure_model(
        module,
        (torch.randn(1, 6),),
        torch.zeros(1, dtype=torch.int64),
        functional.cross_entropy,
        ProfileOptions(microbatch_sizes=(4,), seconds_per_size=0.0),
        name="small",
    )
    x, rng, recomputed = torch.randn(4, 6), PerOperatorRng(0, torch.device("cpu")), {"1", "2", "4"}
    model = trace(module, (x,))
    parts = cut_into_stages(model, {layer.name: 0 for layer in model.layers}, (x,), 4)
    stage = PartlyRecomputedStage(
        stage_module(parts, 0),
        stage_parts(parts, 0, recomputed),
        received=parts.stages[0].loaded,
        arguments={},
        outputs=parts.stages[0].outputs,
        is_sealed=False,
        device=torch.device("cpu"),
        autocast=None,
        rng=rng,
    )
    with saved_beside(module) as kept:
        (y,) = stage(x)
    inputs = [tensor for saved in stage._saved.values() for tensor in saved.inputs]
    kept |= {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in inputs}
    assert sum(kept.values()) == 4 * 4 * (6 + 7 + 7)  # the input, and the outputs of 0 and 3
    rows = list(zip(made.layers, made.at(4), strict=True))[:5]
    stash = sum(measured.stash_bytes for layer, measured in rows if layer.name not in recomputed)
    tensors = kept_tensor_bytes(rows, [layer.name for layer, _ in rows], recomputed)
    assert tensors == 4 * 4 * (7 + 7 + 7)
    assert sum(kept.values()) <= stash + tensors
    weight = module.get_parameter("0.weight")
    (want,) = torch.autograd.grad(module(x).sum(), [weight])
    stage.recompute()
    (got,) = torch.autograd.grad(y.sum(), [weight])
    assert torch.equal(got, want)


def test_what_a_forward_keeps_in_a_closure_changes_once_if_it_is_recomputed() -> None:
    calls, mean = 0, torch.ones(())

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            mean.mul_(0.5)
            y: Tensor = self.linear(x)
            return y * calls + mean

    x = torch.ones(2, 3)
    stage = RecomputedStage(Counts(), torch.device("cpu"))
    outputs = [stage.first(m, lambda: stage(x)) for m in range(2)]
    torch.testing.assert_close(outputs[1] - 0.25, 2 * (outputs[0] - 0.5))
    for m in range(2):
        with stage.recomputing(m):
            assert torch.equal(stage(x), outputs[m])
        assert (calls, mean.item()) == (2, 0.25)


def test_a_tensor_outside_that_a_graph_has_saved_is_not_put_back_in_silence() -> None:
    """The gradient of the weights would be computed with another value than the recomputed forward had."""
    mean = torch.ones(3)

    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            mean.mul_(0.5)
            return x * (self.weight * mean)

    stage = RecomputedStage(Averages(), torch.device("cpu"))
    for m in range(2):
        stage.first(m, lambda: stage(torch.ones(2, 3)))
    with stage.recomputing(0):
        y = stage(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_a_hook_keeps_changes_once_in_a_forward_that_is_recomputed() -> None:
    calls: list[int] = []

    def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls.append(len(calls))
        return output * len(calls)

    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    module.register_forward_hook(hook)
    stage = RecomputedStage(module, torch.device("cpu"))
    outputs = [stage.first(m, lambda: stage(x)) for m in range(2)]
    assert torch.equal(outputs[1], 2 * outputs[0])
    for m in range(2):
        with stage.recomputing(m):
            assert torch.equal(stage(x), outputs[m])
        assert calls == [0, 1]


class Noting(nn.Module):
    """Keeps a tensor in an attribute, and has a layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(3, 3), torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen = self.seen + y.detach().mean(0)
        return y


def test_only_parts_with_code_from_outside_torch_keep_state_beside_buffers() -> None:
    noting = Noting()
    owners = StateOwners.of(nn.Sequential(nn.Linear(3, 3), nn.Sequential(noting, nn.ReLU())))
    assert owners.parts == (("1.0", noting),)
    assert owners.hidden_tensors(set()).keys() == {"1.0.seen"}
    assert not owners.hidden_tensors({id(noting.seen)})
    assert [part for part, _ in owners.state(ForwardCode.of(noting)).attributes] == [noting]
    assert StateOwners.of(nn.Sequential(nn.Linear(3, 3), nn.Dropout())).parts == ()
    holding = nn.Sequential(nn.Linear(3, 3), nn.Sequential(noting))
    holding[0].table = torch.zeros(3)  # as code of other parts may, which then writes to it
    assert StateOwners.of(holding).parts == (("", holding),)


def test_the_attributes_of_torchs_layers_are_not_asked_for_in_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = RecomputedStage(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()), torch.device("cpu"))
    x, asked = torch.randn(2, 3), list[nn.Module]()

    def plain_attributes(part: nn.Module) -> dict[str, object]:
        asked.append(part)
        return {}

    monkeypatch.setattr("bapipe.module_state.python_state.plain_attributes", plain_attributes)
    outputs = [stage.first(m, lambda: stage(x)) for m in range(3)]
    for m, output in enumerate(outputs):
        with stage.recomputing(m):
            assert torch.equal(stage(x), output)
    assert not asked


def test_a_hook_that_is_added_between_steps_counts_each_microbatch_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    stage, x, calls = RecomputedStage(module, torch.device("cpu")), torch.randn(2, 3), [0]

    def count(*_: object) -> None:
        calls[0] += 1

    for step in range(2):
        for m in range(3):
            stage.first(m, lambda: stage(x))
            with stage.recomputing(m):
                stage(x)
        if step == 0:
            module[0].register_forward_hook(count)
    assert calls == [3]
