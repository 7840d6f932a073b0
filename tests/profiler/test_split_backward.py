"""I and W: together they give the gradients of B."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from bapipe.profiler.split_backward import find_weight_groups, run_input_grads


def test_input_and_weight_gradients_add_up_to_the_backward() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    module(x).square().sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    hidden = module[0](x)
    loss = module[2](module[1](hidden)).square().sum()
    roots = [get_gradient_edge(hidden)]
    groups = find_weight_groups(loss, roots, module.parameters())
    run_input_grads(loss, roots, groups, lambda: 2)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert {parameter for group in groups for parameter in group.parameters} == set(module.parameters())
    assert any(group.starts_at_root for group in groups)  # those of the first layer, where I ends
    assert all(group.saved_gradients for group in groups)
    for group in groups:  # I does not run the nodes at which it ends, so nothing said which layer ran there
        assert {layer for _, layer in group.saved_gradients} == {None if group.starts_at_root else 2}
    for group in groups:
        group.run()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.allclose(parameter.grad, gradient)


def test_i_keeps_the_gradients_of_all_parts_of_a_tensor_that_is_split_where_it_ends() -> None:
    layer = nn.Linear(1, 2, bias=False)
    hidden = layer(torch.tensor([[3.0]]))
    first, second = hidden.chunk(2, -1)
    scaled, whole = 5 * second, 7 * hidden
    loss = 2 * first.sum() + scaled.sum() + whole.sum()
    roots = [get_gradient_edge(tensor) for tensor in (first, scaled, whole)]  # but not `second`, nor `hidden`
    (group,) = find_weight_groups(loss, roots, layer.parameters())
    run_input_grads(loss, roots, (group,), lambda: 0)
    group.run()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3 * (2 + 7.0)], [3 * (5 + 7.0)]]


@pytest.mark.parametrize(
    ("layer", "shape", "memory_format"),
    [
        (nn.GroupNorm(2, 4), (2, 4, 3, 3), torch.channels_last),
        (nn.GroupNorm(2, 4), (2, 4, 1, 1), torch.channels_last),  # which is contiguous, too
        (nn.GroupNorm(2, 4), (2, 4, 3, 3, 3), torch.channels_last_3d),
        (nn.GroupNorm(2, 4), (2, 4, 3, 3), torch.contiguous_format),
        (nn.BatchNorm2d(4), (2, 4, 3, 3), torch.channels_last),
        (nn.InstanceNorm2d(4, affine=True), (2, 4, 3, 3), torch.channels_last),
        (nn.LayerNorm((4, 3, 3)), (2, 4, 3, 3), torch.channels_last),
        (nn.Conv2d(4, 4, 2), (2, 4, 3, 3), torch.channels_last),
        (nn.ConvTranspose2d(4, 4, 2), (2, 4, 3, 3), torch.channels_last),
    ],
)
def test_layers_compute_their_weights_gradients_alone_in_any_memory_format(
    layer: nn.Module, shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def hidden_and_loss() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x.sin().contiguous(memory_format=memory_format)
        return hidden, layer(hidden).sin().sum()

    _, *expected = torch.autograd.grad(hidden_and_loss()[1], [x, *layer.parameters()])
    hidden, loss = hidden_and_loss()
    groups = find_weight_groups(loss, [get_gradient_edge(hidden)], layer.parameters())
    run_input_grads(loss, [get_gradient_edge(hidden)], groups, lambda: 0)
    for group in groups:
        group.run()
    torch.testing.assert_close([parameter.grad for parameter in layer.parameters()], expected)
