"""What a profile says of layers besides their measurements."""

from collections import OrderedDict

import msgspec
import pytest
import torch
from torch import Tensor, nn

import bapipe
from bapipe.errors import ConstraintsUnmet, InvalidFile
from bapipe.formats.profile import LOSS
from bapipe.tracing.layers import trace
from bapipe.tracing.stages import cut_into_stages
from tests.models.small_modules import layers, profile

FLOAT = 4  # bytes


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("table", torch.ones(100))
        self.register_buffer("scratch", torch.ones(50), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.get_buffer("table")[:6] * self.get_buffer("scratch")[:6]


class Buffered(nn.Module):
    """Reads a mask in two layers, by an operator that every stage computes for itself, and two buffers in none."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.linear, self.head = Scaled(), nn.Linear(6, 6), nn.Linear(6, 5)
        self.register_buffer("mask", torch.ones(30))
        self.register_buffer("average", torch.ones(7))
        self.register_buffer("unread", torch.ones(11), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.get_buffer("mask")[:6] * 2
        y = self.scaled(x) * mask
        y = self.linear(y) * mask
        scores: Tensor = self.head(y)
        return scores


def test_buffers_count_once_and_are_not_trained() -> None:
    """The first layer also counts what only checkpoints have; nobody holds a buffer that is in neither."""
    made = profile(Buffered(), 6)
    found = {name: layer for name, (layer, _) in layers(made).items()}
    first, linear = found["scaled"], found["linear"]
    assert (first.param_bytes, first.gradient_bytes) == (FLOAT * (6 + 100 + 50 + 30 + 7), FLOAT * 6)
    assert (first.buffer_bytes, first.optimizer_state_bytes) == (FLOAT * (100 + 50 + 30 + 7), FLOAT * 6)
    assert (linear.param_bytes, linear.trained_bytes, linear.buffer_bytes) == (FLOAT * 42, msgspec.UNSET, msgspec.UNSET)
    assert (linear.shares, linear.shared_bytes) == ((), 0)
    plan = bapipe.make(made, 1, minibatch_size=4, microbatch_size=4)
    memory = plan.prediction.ranks[0].memory
    trained = FLOAT * (6 + 42 + 35)
    assert (memory.params, memory.gradients) == (trained + FLOAT * 187, trained)


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_the_statistics_of_a_batch_norm_are_buffers(layer_by_layer: bool) -> None:
    made = profile(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), 6, layer_by_layer=layer_by_layer)
    norm = layers(made)["1"][0]
    num_batches = 8  # bytes of one integer
    assert (norm.param_bytes, norm.trained_bytes) == (FLOAT * 4 * 5 + num_batches, FLOAT * 2 * 5)
    assert norm.buffer_bytes == FLOAT * 2 * 5 + num_batches


def test_parameters_that_no_layer_uses_count_for_the_first_and_are_not_trained() -> None:
    module = nn.Sequential(nn.Linear(6, 5))
    module.register_parameter("unused", nn.Parameter(torch.ones(9)))
    first = layers(profile(module, 6))["0"][0]
    assert (first.param_bytes, first.trained_bytes) == (FLOAT * (35 + 9), FLOAT * 35)


def test_more_buffers_than_bytes_that_are_not_trained_are_refused() -> None:
    made = profile(nn.Sequential(nn.Linear(6, 5)), 6)
    first = msgspec.structs.replace(made.layers[0], trained_bytes=FLOAT * 30, buffer_bytes=FLOAT * 6)
    with pytest.raises(InvalidFile, match=r"24 is more than what is not trained of `param_bytes`.*buffer_bytes"):
        msgspec.structs.replace(made, layers=(first, *made.layers[1:]))


def test_a_layer_may_be_named_target() -> None:
    module = nn.Sequential(
        OrderedDict([("stem", nn.Linear(6, 6)), ("target", nn.Linear(6, 6)), ("head", nn.Linear(6, 5))])
    )
    made = profile(module, 6)
    assert [(layer.name, layer.inputs) for layer in made.layers[1:]] == [
        ("target", ("stem",)),
        ("head", ("target",)),
        ("loss", ("head", "input:target")),
    ]


class ChangesAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h[:, :4]
        between = self.b(h.clone())
        view.add_(1.5)
        scores: Tensor = self.head(self.c(between + h) + h)
        return scores


def test_layers_that_a_change_in_place_binds_are_in_one_stage_of_every_plan() -> None:
    made, inputs = profile(ChangesAView(), 6), [torch.randn(4, 6)]
    model = trace(ChangesAView(), inputs)
    for num_stages in (2, 3):
        plan = bapipe.plan(made, num_stages, minibatch_size=8, microbatch_size=4, num_stages=num_stages)
        stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.layers if name != LOSS}
        cut_into_stages(model, stage_of, inputs, 4)  # raises InvalidModel if the stages part them
    with pytest.raises(ConstraintsUnmet):
        bapipe.plan(made, 4, minibatch_size=8, microbatch_size=4, num_stages=4)
