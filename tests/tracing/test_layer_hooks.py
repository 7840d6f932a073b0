"""What hooks on layers keep, and the model's own code reads, as feature extractors do."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bapipe.tracing.layers import trace


class Features(nn.Module):
    """Returns what two of its layers return, which their hooks keep."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.kept: dict[str, Tensor] = {}
        for name in ("a", "b"):
            self.register(name, self.get_submodule(name))

    def register(self, name: str, layer: nn.Module) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        self.b(self.a(x).tanh())
        return [kept * 2 for kept in self.kept.values()]


class InAClosure(Features):
    def register(self, name: str, layer: nn.Module) -> None:
        def keep(module: nn.Module, args: Any, result: Tensor) -> None:
            self.kept[name] = result

        layer.register_forward_hook(keep)


class InADefault(Features):
    def register(self, name: str, layer: nn.Module) -> None:
        def keep(module: nn.Module, args: Any, result: Tensor, kept: dict[str, Tensor] = self.kept) -> None:
            kept[name] = result

        layer.register_forward_hook(keep)


class InADefaultByKeyword(Features):
    def register(self, name: str, layer: nn.Module) -> None:
        def keep(module: nn.Module, args: Any, result: Tensor, *, kept: dict[str, Tensor] = self.kept) -> None:
            kept[name] = result

        layer.register_forward_hook(keep)


class BesideAVariableWithoutAValue(Features):
    def register(self, name: str, layer: nn.Module) -> None:
        def keep(module: nn.Module, args: Any, result: Tensor) -> None:
            self.kept[name] = result
            if name == "c":
                print(later)

        layer.register_forward_hook(keep)
        if name == "c":
            later = 1


class InAMethod(Features):
    def register(self, name: str, layer: nn.Module) -> None:
        layer.register_forward_hook(partial(self.keep, name))

    def keep(self, name: str, module: nn.Module, args: Any, result: Tensor) -> None:
        self.kept[name] = result


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", [InAClosure, InADefault, InADefaultByKeyword, BesideAVariableWithoutAValue, InAMethod])
def test_the_models_code_reads_what_hooks_on_layers_keep(kind: type[Features], *, has_run: bool) -> None:
    torch.manual_seed(0)
    module = kind()
    if has_run:  # what is kept then is of another forward
        module(torch.rand(4, 3))
    model = trace(module, [torch.rand(4, 3)])
    assert [layer.name for layer in model.layers] == ["a", "b"]
    x = torch.rand(5, 3)
    a = x @ module.a.weight.t() + module.a.bias
    b = a.tanh() @ module.b.weight.t() + module.b.bias
    found = model.result.rebuild(model.module(x))
    assert isinstance(found, list)
    for value, expected in zip(found, [2 * a, 2 * b], strict=True):
        assert torch.allclose(value, expected, atol=1e-6)


def test_modules_whose_results_transformers_collects_are_cut() -> None:
    """A backbone returns what hooks on its stages have collected, each of which holds several layers."""
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(
        hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, drop_path_rate=0.0, out_features=["stage1", "stage2"]
    )
    backbone = transformers.ConvNextBackbone(config)

    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = backbone, nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.backbone(x).feature_maps
            scores: Tensor = self.head(second.mean((2, 3))) + first.mean()
            return scores

    module, x = Maps(), torch.randn(2, 3, 32, 32)
    model = trace(module, (x,))
    assert not model.leaf_reasons
    assert {"backbone.encoder.stages.1.layers.0.pwconv1", "backbone.encoder.stages.1.layers.0.pwconv2"} <= {
        layer.name for layer in model.layers
    }
    (scores,) = model.module(x)
    parameters = list(module.parameters())
    found = torch.autograd.grad(scores.square().sum(), parameters)
    expected = torch.autograd.grad(module(x).square().sum(), parameters)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other)
