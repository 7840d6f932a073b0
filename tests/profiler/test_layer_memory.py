"""Bytes of small modules, counted by hand."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.formats.settings import Settings
from bapipe.profiler.layer_memory import MemoryUse, memory_of_passes
from tests.models.small_modules import Blocks, Branches, Masked, Reader, Tied, layers, profile


def test_linear_layers() -> None:
    made = profile(nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5)), 10)
    (a, at_a), (b, at_b), (loss, at_loss) = layers(made).values()
    assert (a.param_bytes, a.optimizer_state_bytes) == (4 * (10 * 20 + 20),) * 2
    assert b.param_bytes == 4 * (20 * 5 + 5)
    assert (at_a.output_bytes, at_b.output_bytes, at_loss.output_bytes) == ((4 * 4 * 20,), (4 * 4 * 5,), (0,))
    assert at_a.stash_bytes == 4 * 4 * 10  # the model's input
    assert at_b.stash_bytes == 4 * 4 * 20  # a's output
    assert at_a.gradient_stash_bytes == 4 * 4 * 20  # the gradient of a's output waits for W
    assert at_b.gradient_stash_bytes == 4 * 4 * 5
    assert at_loss.gradient_stash_bytes == 0
    # b backward: the gradients of its output and its input, then those of weight and bias, to be added.
    assert at_b.workspace_bytes >= 4 * (4 * 5 + 4 * 20 + 20 * 5)
    assert at_b.workspace_bytes <= 4 * (4 * 5 + 4 * 20 + 20 * 5 + 5) + 1024
    assert (loss.name, loss.kind, loss.inputs, loss.outputs) == ("loss", "cross_entropy", ("1", "target"), ("loss",))
    # log-softmax of 4 x 5 scores, 4 targets of 8 bytes, and the sum of the weights
    assert at_loss.stash_bytes == 4 * 4 * 5 + 4 * 8 + 4
    assert at_a.input_grad_ns == 0  # nobody needs the gradient of the data
    assert at_b.input_grad_ns > 0
    assert at_a.weight_grad_ns > 0


def test_memory_is_measured_without_a_stderr() -> None:
    def passes() -> tuple[MemoryUse, MemoryUse]:
        return memory_of_passes(torch.device("cpu"), lambda: (torch.zeros(256), torch.zeros(64))[0], lambda x: x * x)

    expected, stderr = passes(), os.dup(2)
    os.close(2)
    try:
        assert passes() == expected
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    assert (expected[0].peak_bytes, expected[0].after_bytes) == (4 * (256 + 64), 4 * 256)


def test_relu_in_place_shares_the_storage_of_the_convolution() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    found = layers(profile(module, 3, 8, 8))
    stash = {name: m.stash_bytes for name, (_, m) in found.items()}
    assert stash["0"] == 4 * 4 * 3 * 8 * 8
    assert stash["1"] == 4 * 4 * 8 * 8 * 8  # its output, which the convolution made
    assert stash["2"] == 0  # its input is the same storage
    assert found["1"][1].output_bytes == found["0"][1].output_bytes == (4 * 4 * 8 * 8 * 8,)
    assert found["1"][1].input_grad_ns > 0


def test_dropout_keeps_its_mask_and_leaves_no_input() -> None:
    stash = {
        n: m.stash_bytes for n, (_, m) in layers(profile(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)), 6)).items()
    }
    assert stash == {"0": 4 * 4 * 6, "1": 4 * 5 * 4, "loss": 4 * 4 * 5 + 4 * 8 + 4}  # a float mask in torch on a CPU


def test_batch_norm_keeps_its_input_and_two_figures_a_channel() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    found = layers(profile(module, 3, 6, 6))
    assert {name: m.stash_bytes for name, (_, m) in found.items()} == {
        "0": 4 * 4 * 3 * 6 * 6,
        "1": 4 * 4 * 5 * 4 * 4 + 2 * 4 * 5,  # the convolution's output, means and deviations; not its own parameters
        "2": 4 * 4 * 5 * 4 * 4,  # its output, which the batch norm made
        "3": 0,
        "4": 0,
        "loss": 4 * 4 * 5 + 4 * 8 + 4,
    }
    left = {name: m.gradient_stash_bytes for name, (_, m) in found.items()}
    assert left == {"0": 1280, "1": 1280, "2": 0, "3": 0, "4": 0, "loss": 0}
    assert found["1"][0].gradient_bytes == 4 * 2 * 5  # running statistics are not trained


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="other processors have other LSTMs")
def test_lstm_keeps_states_and_its_own_workspace() -> None:
    found = layers(profile(Reader(), 6, 3))
    lstm = nn.LSTM(3, 7)
    state = torch.zeros(4, 7)
    weights: list[Any] = list(lstm.parameters())
    made = torch.mkldnn_rnn_layer(
        torch.zeros(6, 4, 3),
        *weights,
        state,
        state,
        False,
        [],
        2,
        7,
        1,
        True,
        False,
        False,
        True,  # type: ignore[call-arg]
    )
    kept = 4 * 6 * 4 * (3 + 7) + 4 * 4 * 4 * 7  # its input and output; both states before and after
    assert found["lstm"][1].stash_bytes == kept + made[3].nbytes
    assert found["lstm"][1].gradient_stash_bytes == 4 * 6 * 4 * 7  # of all its outputs, of which one was used
    assert found["head"][1].stash_bytes == 0  # it reads the LSTM's output
    assert found["embed"][1].stash_bytes == 4 * 4 * 6 * 3


def test_a_storage_counts_once_however_many_layers_save_it() -> None:
    found = layers(profile(Branches(), 6))
    assert [m.stash_bytes for _, m in found.values()][:4] == [96, 96, 0, 96]
    assert [m.gradient_stash_bytes for _, m in found.values()][:4] == [96, 96, 0, 80]


def test_shared_parameters_count_once() -> None:
    found = layers(profile(Tied(), 6))
    assert (found["a"][0].param_bytes, found["b"][0].param_bytes) == (4 * (36 + 6), 4 * 6)
    a, b = found["a"][1], found["b"][1]
    assert a.weight_grad_ns == a.backward_ns  # torch cannot part W of what layers share: B - I, and I is 0
    assert b.weight_grad_ns == max(b.whole_backward_ns - b.input_grad_ns, 0)
    assert (found["a"][0].shares, found["b"][0].shares, found["head"][0].shares) == (("b",), ("a",), ())
    assert (found["a"][0].shared_bytes, found["b"][0].shared_bytes) == (0, 4 * 36)
    # a backward: the gradient of its output, b's gradient of the weights that waits for a's, a's own; and of the bias.
    assert 4 * 4 * 6 + 2 * 4 * 36 <= a.workspace_bytes <= 4 * 4 * 6 + 2 * 4 * 36 + 2 * 4 * 6


def test_outputs_without_gradient_are_named() -> None:
    a = layers(profile(Masked(), 6))["a"][0]
    assert len(a.outputs) == 2
    assert a.no_gradient == (a.outputs[1],)


@pytest.mark.parametrize(
    ("optimizer", "state"), [("sgd", 0), ("sgd-momentum", 168), ("adam", 2 * 168 + 2 * 4), ("adamw", 2 * 168 + 2 * 4)]
)
def test_optimizer_state(optimizer: str, state: int) -> None:
    """Adam keeps two values for each parameter, and a step count for each tensor."""
    made = profile(nn.Sequential(nn.Linear(6, 6)), 6, settings=Settings(optimizer=optimizer))
    assert (made.layers[0].param_bytes, made.layers[0].optimizer_state_bytes) == (168, state)


def test_settings_are_those_measured_under_and_leave_no_trace() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    made = profile(module, 3, 8, 8, settings=Settings(autocast="bfloat16", channels_last=True))
    assert made.settings == Settings(dtype="float32", autocast="bfloat16", channels_last=True)
    found = layers(made)
    assert found["0"][1].output_bytes == (2 * 4 * 8 * 8 * 8,)  # bfloat16
    # the batch and the weights, both as bfloat16: autocast makes them anew
    assert found["0"][1].stash_bytes == 2 * 4 * 3 * 8 * 8 + 2 * 8 * 3 * 3 * 3
    assert module[0].weight.is_contiguous()  # type: ignore[operator]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("make", "shape"), [(Blocks, (3, 8, 8)), (Reader, (6, 3)), (Branches, (6,)), (Tied, (6,)), (Masked, (6,))]
)
def test_layers_one_by_one_take_the_bytes_of_the_whole(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = make()
    whole = profile(module, *shape)
    alone = profile(module, *shape, layer_by_layer=True)
    assert [(a.name, a.inputs, a.outputs, a.no_gradient) for a in alone.layers] == [
        (b.name, b.inputs, b.outputs, b.no_gradient) for b in whole.layers
    ]
    at_whole, at_alone = whole.measurements[0].layers, alone.measurements[0].layers
    assert [m.output_bytes for m in at_alone] == [m.output_bytes for m in at_whole]
    assert [m.stash_bytes for m in at_alone] == [m.stash_bytes for m in at_whole]
    assert all(m.forward_ns > 0 and m.whole_backward_ns > 0 for m in at_alone)
    assert at_alone[0].input_grad_ns == 0
    assert all(m.input_grad_ns > 0 for m in at_alone[1:])


def test_what_was_allocated_before_a_profile_is_not_counted_where_it_is_freed() -> None:
    """torch still lists the addresses of an earlier profile, at which other storages lie by now."""
    earlier: list[Tensor] = []

    def allocate() -> None:
        earlier.extend(torch.empty(100) for _ in range(3000))

    memory_of_passes(torch.device("cpu"), allocate, lambda _: None)
    earlier.clear()
    others = [torch.empty(80) for _ in range(3000)]
    forward, backward = memory_of_passes(torch.device("cpu"), lambda: torch.empty(10), lambda _: others.clear())
    assert not others
    assert (forward.before_bytes, forward.peak_bytes, forward.after_bytes) == (0, 40, 40)
    assert (backward.before_bytes, backward.peak_bytes) == (40, 40)
    assert backward.after_bytes >= 0


class Derivative(nn.Module):
    """Returns 3 x², as the derivative of the sum of x³."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.func.grad(lambda y: y.pow(3).sum())(x)
        return result


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_what_transforms_save_is_counted(*, layer_by_layer: bool) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Derivative(), nn.Linear(6, 5))
    _, at_derivative = layers(profile(module, 6, layer_by_layer=layer_by_layer))["1"]
    assert at_derivative.stash_bytes >= 4 * 4 * 6  # x at least, of which the derivative of 3 x² is made
