"""Checks of modules and examples, batches, and the state that measuring restores."""

import random

import numpy
import pytest
import torch
from torch import nn

from bapipe.errors import InvalidModel
from bapipe.formats.profile import DeviceKind
from bapipe.formats.settings import Settings
from bapipe.module_state.python_random import seed_cpu_generators
from bapipe.profiler import prepare

CPU = torch.device("cpu")


def test_a_batch_repeats_the_examples() -> None:
    x, y = prepare.batch_on_device((torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 2])), 5, CPU)
    assert x.flatten().tolist() == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert y.tolist() == [0, 1, 2, 0, 1]


def test_a_module_and_the_global_generators_are_restored() -> None:
    norm = nn.BatchNorm1d(2)
    module = nn.Sequential(nn.Linear(2, 2), norm, nn.Dropout(0.5)).eval()
    seed_cpu_generators(1)
    expected = torch.rand(1).item(), random.random(), numpy.random.rand()
    seed_cpu_generators(1)
    with prepare.prepared(module, CPU, Settings()):
        assert all(submodule.training for submodule in module.modules())
        module(torch.randn(4, 2)).sum().backward()
        random.random(), numpy.random.rand()
        assert norm.running_mean is not None
        assert norm.running_mean.tolist() != [0.0, 0.0]
    assert [submodule.training for submodule in module.modules()] == [False, False, False, False]
    assert norm.running_mean.tolist() == [0.0, 0.0]
    assert all(parameter.grad is None for parameter in module.parameters())
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == expected


class Growing(nn.Module):
    """A buffer that the first forward makes larger, before another one."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.ones(1))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.resize_(2).fill_(3.0)
        y: torch.Tensor = self.norm(x * self.weight * self.seen)
        return y


def test_a_buffer_that_a_forward_makes_larger_is_restored() -> None:
    module = Growing().eval()
    seen = module.seen
    with prepare.prepared(module, CPU, Settings()):
        module(torch.randn(4, 2))
    assert module.seen is seen
    assert seen.tolist() == [1.0]
    assert module.norm.running_mean is not None
    assert module.norm.running_mean.tolist() == [0.0, 0.0]
    assert not module.training


class Keeping(nn.Linear):
    """A counter, a list and a generator in attributes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.seen, self.generator = 0, [1], torch.Generator().manual_seed(3)


def test_what_a_module_keeps_in_attributes_is_restored() -> None:
    module = Keeping()
    seen, state = module.seen, module.generator.get_state()
    with prepare.prepared(module, CPU, Settings()):
        module.calls += 1
        module.seen.append(2)
        torch.rand(2, generator=module.generator)
    assert (module.calls, module.seen) == (0, [1])
    assert module.seen is seen
    assert torch.equal(module.generator.get_state(), state)


def test_embeddings_that_limit_their_norm_are_restored() -> None:
    module = nn.Embedding(3, 2, max_norm=0.1)
    before = module.weight.detach().clone()
    with prepare.prepared(module, CPU, Settings()):
        module(torch.arange(3))
        assert not torch.equal(module.weight, before)
    assert torch.equal(module.weight, before)


def test_parts_of_a_module_in_training_mode_stay_in_evaluation_mode() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    with prepare.prepared(module, CPU, Settings()):
        assert [submodule.training for submodule in module.modules()] == [True, True, False]


def test_a_module_goes_back_to_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[torch.device] = []
    monkeypatch.setattr(nn.Module, "to", lambda _, device: moves.append(device))
    with prepare.prepared(nn.Linear(2, 2), torch.device("meta"), Settings()):
        assert moves == [torch.device("meta")]
    assert moves == [torch.device("meta"), CPU]


@pytest.mark.parametrize("before", [torch.contiguous_format, torch.channels_last])
def test_tensors_keep_their_memory_format(before: torch.memory_format) -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=before)  # type: ignore[call-overload]
    table = torch.randn(2, 3, 4, 4).contiguous(memory_format=before)
    module.register_buffer("table", table)
    weight, value = module.weight, module.weight.detach().clone()
    with prepare.prepared(module, CPU, Settings(channels_last=True)):
        assert weight.is_contiguous(memory_format=torch.channels_last)
    assert module.weight is weight
    assert weight.is_contiguous(memory_format=before)
    assert torch.equal(weight, value)
    assert module.table is table


@pytest.mark.parametrize(("kind", "num_bytes"), [("cpu", 3 * 64), ("cuda", 2 * 64)])
def test_a_module_fits_if_memory_exceeds_parameters_gradients_and_on_a_cpu_the_values_to_put_back(
    kind: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(4, 4, bias=False)  # 64 bytes of parameters
    for memory_bytes, fits in ((num_bytes, False), (num_bytes + 1, True)):
        device = DeviceKind(kind=kind, name="small", memory_bytes=memory_bytes)
        monkeypatch.setattr(prepare, "describe", lambda _, device=device: device)
        assert prepare.fits_on_device(module, torch.device(kind)) is fits


def test_modules_on_the_meta_device_and_without_parameters_are_refused() -> None:
    with pytest.raises(InvalidModel, match=r"^Linear is on the meta device, so it cannot run"):
        prepare.check_trainable(nn.Linear(2, 2, device="meta"))
    with pytest.raises(InvalidModel, match=r"^ReLU has no parameter to train"):
        prepare.check_trainable(nn.ReLU())
