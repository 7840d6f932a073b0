"""I and W: together they give the gradients of B."""

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
