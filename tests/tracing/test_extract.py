"""A part of a chain as a module."""

import torch
from torch import nn

from bapipe.tracing.extract import extract
from bapipe.tracing.layers import trace


def test_extracted_layers_share_parameters_and_compute_the_same() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    model = trace(module, (torch.zeros(1, 2),))
    end = extract(model, ["1", "2"], ["0"], ["2"])
    assert dict(end.named_parameters())["2.weight"] is module[2].weight
    x = torch.randn(4, 2)
    assert torch.equal(end(module[0](x))[0], module(x))


def test_an_input_that_is_changed_in_place_is_copied() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    model = trace(module, (torch.zeros(1, 2),))
    end = extract(model, ["1"], ["0"], ["1"])
    x = torch.tensor([[-1.0, 1.0]])
    assert end(x)[0].tolist() == [[0.0, 1.0]]
    assert x.tolist() == [[-1.0, 1.0]]
