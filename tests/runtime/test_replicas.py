"""The sum of the replicas' gradients, in a group of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bapipe.errors import InvalidModel
from bapipe.runtime.clock import CpuClock
from bapipe.runtime.replicas import GradientSum
from bapipe.torch_private.split_backward import stage_backward_input, stage_backward_weight

CLOCK = CpuClock()


def sum_of(*parameters: nn.Parameter) -> GradientSum:
    """The sum of the gradients of one layer, when it is done."""
    group = dist.group.WORLD
    assert group is not None
    gradients = GradientSum([parameters], group, CLOCK)
    gradients.begin()
    gradients.start()
    gradients.finish()
    return gradients


@pytest.mark.usefixtures("alone")
def test_a_parameter_for_which_no_replica_has_a_gradient_keeps_none() -> None:
    """An optimizer skips it, as in one process: by zeros, momentum and weight decay would move it."""
    without, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    other.grad = torch.tensor([1.0, 2.0, 3.0])
    sum_of(without, other)
    assert without.grad is None
    assert other.grad.tolist() == [1, 2, 3]


@pytest.mark.usefixtures("alone")
def test_an_all_reduce_takes_time() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    ((bucket, num_bytes, start, end),) = sum_of(parameter).syncs()
    assert (bucket, num_bytes) == (0, 4 * 3)  # in float32, and whether there is a gradient
    assert CLOCK.ns(end) > CLOCK.ns(start)


def step(gradients: GradientSum, weight: nn.Parameter, num_parts: int) -> tuple[Tensor, int]:
    """Returns the summed gradient of a weight that comes in so many parts; and how many sums began in the backward."""
    weight.grad = None
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(num_parts):
        x = checkpoint(lambda given: torch.tanh(given @ weight), x, use_reentrant=True)
    gradients.begin()
    with gradients.last_backward():
        x.sum().backward()
    num_early = len(gradients.syncs())
    gradients.start()
    gradients.finish()
    assert weight.grad is not None
    return weight.grad, num_early


def whole_gradient(weight: nn.Parameter, num_parts: int) -> Tensor:
    x = torch.ones(1, 2)
    for _ in range(num_parts):
        x = torch.tanh(x @ weight)
    (gradient,) = torch.autograd.grad(x.sum(), weight)
    return gradient


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("num_parts", "num_early"), [(1, [0, 1, 1]), (3, [0, 0, 0])])
def test_a_gradient_that_comes_in_several_parts_is_summed_when_it_is_whole(
    num_parts: int, num_early: list[int]
) -> None:
    weight = nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.25]]))
    group = dist.group.WORLD
    assert group is not None
    gradients = GradientSum([[weight]], group, CLOCK)
    for wanted in num_early:
        gradient, early = step(gradients, weight, num_parts)
        assert early == wanted
        torch.testing.assert_close(gradient, whole_gradient(weight, num_parts))


@pytest.mark.usefixtures("alone")
def test_a_gradient_that_begins_to_come_in_parts_is_refused() -> None:
    weight = nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.25]]))
    group = dist.group.WORLD
    assert group is not None
    gradients = GradientSum([[weight]], group, CLOCK)
    for _ in range(2):
        step(gradients, weight, 1)
    with pytest.raises(InvalidModel, match=r"^the gradient of a parameter came again .* use_reentrant=False"):
        step(gradients, weight, 2)


@pytest.mark.usefixtures("alone")
def test_buckets_start_in_the_last_weight_gradients() -> None:
    """Of the first step none: it learns whether gradients come in parts. Both micro-batches count."""
    torch.manual_seed(0)
    module, group = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), dist.group.WORLD
    assert group is not None
    gradients = GradientSum([[*module[0].parameters()], [*module[2].parameters()]], group, CLOCK)
    inputs = [torch.randn(5, 3, requires_grad=True) for _ in range(2)]
    wanted = torch.autograd.grad(sum(module(x).sum() for x in inputs), [*module.parameters()])
    for wanted_early in (0, 1):
        module.zero_grad()
        gradients.begin()
        groups = []
        for x in inputs:
            y = module(x)
            groups.append(stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())[1])
        stage_backward_weight(module.parameters(), groups[0])
        assert not gradients.syncs()
        with gradients.last_backward():
            stage_backward_weight(module.parameters(), groups[1])
        assert len(gradients.syncs()) == wanted_early
        gradients.start()
        assert len(gradients.syncs()) == 1  # both layers are far below 25 MiB
        gradients.finish()
        for parameter, value in zip(module.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, value)
