"""What holds for every model of the zoo: it builds anywhere, starts from sound values, and learns from its data."""

import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from bapipe.zoo import ZOO
from bapipe.zoo.example import Example
from tests.models.small_zoo import SMALL, build_on_meta, small

pytestmark = pytest.mark.parametrize("name", sorted(ZOO))


@pytest.fixture(autouse=True)
def _seeded(one_thread: None) -> None:
    torch.manual_seed(0)


def batch(example: Example, indices: range) -> tuple[tuple[Tensor, ...], Tensor]:
    assert example.data is not None
    data = example.data("synthetic")
    inputs, target = default_collate([data[i] for i in indices])
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), target


def state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def test_every_model_has_a_small_version(name: str) -> None:
    assert name in SMALL
    assert sum(p.numel() for p in build_on_meta(ZOO[name], SMALL[name]).module.parameters()) < 2_000_000


def test_data_are_like_the_example_inputs(name: str) -> None:
    example = small(name)
    inputs, target = batch(example, range(2))
    for given, wanted in zip((*inputs, target), (*example.inputs, example.target), strict=True):
        assert (given.shape[1:], given.dtype) == (wanted.shape[1:], wanted.dtype)
    again, _ = batch(pickle.loads(pickle.dumps(example)), range(2))  # data functions travel to the ranks
    assert all(torch.equal(a, b) for a, b in zip(inputs, again, strict=True))
    other, _ = batch(example, range(1, 3))
    assert torch.equal(inputs[0][1], other[0][0])
    assert not torch.equal(inputs[0][0], inputs[0][1])


def test_meta_build_holds_nothing_and_takes_sound_values(name: str) -> None:
    example, real = build_on_meta(ZOO[name], SMALL[name]), small(name)
    assert all(tensor.is_meta for tensor in (*state(example.module).values(), *example.inputs, example.target))
    shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in state(example.module).items()}
    assert shapes == {key: (tensor.shape, tensor.dtype) for key, tensor in state(real.module).items()}
    assert all(tensor.isfinite().all() for tensor in state(real.module).values())
    module = small(name).module
    with torch.no_grad():
        for tensor in state(module).values():
            tensor.fill_(math.nan if tensor.is_floating_point() else -77)
    for part in reversed(list(module.modules())):  # as ranks do with their own layers
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
        if example.initialize is not None:
            example.initialize(part)
    for key, tensor in state(module).items():
        assert tensor.isfinite().all(), key
        assert not (tensor == -77).any(), key
        expected = state(real.module)[key]
        if tensor.numel() >= 256 and tensor.is_floating_point():  # both draws are of one distribution
            assert tensor.std().item() == pytest.approx(expected.std().item(), rel=0.3), key
            assert abs(tensor.mean() - expected.mean()) <= 0.5 * expected.std(), key


def test_mean_loss_of_micro_batches_is_that_of_the_whole(name: str) -> None:
    example = small(name)
    module = example.module.eval().double()  # in training batch norm sees micro-batches
    inputs, target = batch(example, range(6))
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    target = target.double() if target.is_floating_point() else target
    whole = example.loss(module(*inputs), target)
    parts = [example.loss(module(*(x[i : i + 2] for x in inputs)), target[i : i + 2]) for i in (0, 2, 4)]
    assert whole.shape == ()
    assert whole.item() == pytest.approx(sum(part.item() for part in parts) / 3, rel=1e-12)


def test_training_lowers_the_loss(name: str) -> None:
    example = small(name)
    optimizer = torch.optim.Adam(example.module.parameters(), lr=0.003)
    batches = [batch(example, range(start, start + 16)) for start in (0, 16)]
    losses = []
    for step in range(20):
        inputs, target = batches[step % 2]
        optimizer.zero_grad()
        loss = example.loss(example.module(*inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for key, parameter in example.module.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.isfinite().all(), key
    assert sum(losses[-4:]) < 0.96 * sum(losses[:4]), losses
