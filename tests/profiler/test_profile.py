"""Profiles of small modules: which layers are measured, and how often."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from itertools import groupby
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bapipe
from bapipe.errors import BapipeError
from bapipe.formats import codec
from bapipe.formats.profile import DeviceKind
from bapipe.formats.settings import Settings
from bapipe.profiler.instrument import InstrumentedModel, TensorInfo, TrainingPass, parameters_of
from bapipe.profiler.layer_calls import equal_layer_groups
from bapipe.profiler.layer_times import group_means, spread
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.tracing.layers import trace
from tests.models.small_modules import Blocks, Branches, Reader, layers, profile


def test_a_profile_round_trips_and_the_module_is_unchanged() -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    told: list[tuple[int, int, str]] = []
    made = measure_model(
        module,
        (torch.randn(2, 3, 6, 6),),
        torch.tensor([0, 1]),
        nn.CrossEntropyLoss(),
        ProfileOptions(microbatch_sizes=(4, 1), settings=Settings(threads=threads + 1), seconds_per_size=0.0),
        name="small",
        factory="own:net",
        arguments={"width": 3},
        progress=lambda done, total, what: told.append((done, total, what)),
    )
    assert codec.decode(codec.encode(made)) == made
    assert made.microbatch_sizes == (1, 4)
    assert made.layers[-1].kind == "CrossEntropyLoss"
    assert (made.dtype, made.device.kind, made.factory, made.arguments) == ("float32", "cpu", "own:net", {"width": 3})
    assert told[:2] == [(0, 6, "trace and check of the split model"), (1, 6, "times at micro-batch size 1")]
    assert told[-1] == (6, 6, "done")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(part.training for part in module.modules())
    assert torch.get_num_threads() == threads
    assert all(parameter.grad is None for parameter in module.parameters())


class Mixed(nn.Module):
    """In-place operators, two inputs, a residual, and parameters that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 6, batch_first=True)
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.LayerNorm(6)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(6, 9)

    def forward(self, words: Tensor, x: Tensor) -> Tensor:
        y = self.lstm(self.words(words))[0][:, -1]
        z = self.relu(self.a(y)) + self.norm(y)
        z += self.b(x)
        scores: Tensor = self.head(z)
        return scores


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Mixed, (torch.randint(9, (4, 5)), torch.randn(4, 6))),
        (Branches, (torch.randn(4, 6),)),
        (Reader, (torch.randn(4, 6, 3),)),
    ],
)
def test_split_and_whole_backward_give_the_same_gradients(
    make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]
) -> None:
    torch.manual_seed(0)
    module = make().double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    target = torch.tensor([0, 1, 2, 3])
    training_pass = TrainingPass(
        model=trace(module, inputs), loss=functional.cross_entropy, inputs=inputs, target=target
    )
    reported: list[int] = []
    instrumented = InstrumentedModel(training_pass=training_pass, enter=reported.append)
    for _ in range(2):  # gradients add up
        functional.cross_entropy(module(*inputs), target).backward()
    want = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    for _ in range(2):
        groups = instrumented.backward_inputs(instrumented.forward())
        assert any(group.saved_gradients for group in groups)
        reported.clear()
        instrumented.backward_weights(groups)
        with_parameters = {i for i, own in enumerate(parameters_of(training_pass.model)) if own}
        assert set(reported) <= with_parameters
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], rtol=1e-12, atol=1e-14)


def test_the_spread_of_a_median() -> None:
    assert spread([100, 90, 130]) == (130 - 90) / 2 / 100  # few values: all of them
    assert spread([10] * 9 + [99]) == 0.0  # of ten, the second to the ninth
    assert spread([1, *range(100, 124), 10**6]) == (116 - 107) / 2 / 111.5  # of 26, the ninth to the eighteenth
    assert spread([0, 0, 0]) == 0.0


@pytest.mark.parametrize("layer_by_layer", [False, True])
@pytest.mark.parametrize(("exhaustive", "num_groups"), [(False, 8), (True, 14)])
def test_equal_layers_are_measured_once(exhaustive: bool, num_groups: int, layer_by_layer: bool) -> None:
    """Of the three blocks only the first convolution, norm and ReLU with its sum; four more layers and the loss."""
    made = profile(Blocks(), 3, 8, 8, layer_by_layer=layer_by_layer, exhaustive=exhaustive)
    assert len(made.layers) == 14
    assert made.environment["kinds_of_layers"] == {"4": num_groups}
    a, b = (layers(made)[f"convolutions.{i}"][1] for i in (0, 2))
    same = (a.forward_ns, a.backward_ns, a.spread) == (b.forward_ns, b.backward_ns, b.spread)
    assert same is not exhaustive


class Heads(nn.Module):
    """Attention of two heads, three times, and of three; what attention gives lies otherwise in memory than the input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(6, heads, batch_first=True) for heads in (2, 2, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        for attention in self.attention:
            x = attention(x, x, x)[0]
        return x[:, 0]


def test_layers_with_different_settings_are_not_equal() -> None:
    inputs = (torch.randn(2, 4, 6, requires_grad=True),)
    model = trace(Heads(), inputs, leaf_modules=["attention.*"])
    training_pass = TrainingPass(model=model, loss=functional.cross_entropy, inputs=inputs, target=torch.tensor([0, 1]))
    given = {f"attention.{i}": TensorInfo(num_bytes=0, has_gradient=True) for i in range(4)}
    assert [layer.name for layer in model.layers] == list(given)
    assert equal_layer_groups(training_pass, given, range(5)) == (0, 1, 1, 3, 4)
    assert equal_layer_groups(training_pass, given, [0, 2, 3, 4]) == (0, 1, 2, 3, 4)  # the second has no backward
    del given["attention.0"]  # so that no gradient leaves the second one
    assert equal_layer_groups(training_pass, given, range(5)) == (0, 1, 2, 3, 4)


def test_the_time_of_equal_layers_is_their_mean() -> None:
    assert group_means([10, 3, 20, 5, 30], (0, 1, 0, 3, 0)) == [20, 3, 20, 5, 20]
    # Halves are rounded to even; the third time is that of the instrumentation.
    assert group_means([10, 3, 77], (0, 0)) == [6, 6]


class Looking(nn.Identity):
    """Notes how many parameters of the model have gradients when it runs."""

    model: nn.Module
    found: ClassVar[list[int]] = []

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.found.append(sum(p.grad is not None for p in self.model.parameters()))
        return input.clone()


def test_layers_one_by_one_leave_no_gradients() -> None:
    Looking.__module__ = "torch.nn.own"  # a layer, to the tracer
    looking = Looking()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), looking, nn.Linear(6, 5))
    object.__setattr__(looking, "model", model)  # not as a module of its own
    made = profile(model, 6, layer_by_layer=True)
    assert str(made.environment["equivalence"]).endswith(
        "not compared with the original: it is measured layer by layer"
    )
    assert len(looking.found) > 3
    assert set(looking.found) == {0}


@pytest.mark.parametrize(("memory_bytes", "alone"), [(3 * 4 * 42 + 1, False), (3 * 4 * 42, True)])
def test_a_model_that_does_not_fit_is_measured_layer_by_layer(
    memory_bytes: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = DeviceKind(kind="cpu", name="small", memory_bytes=memory_bytes)
    monkeypatch.setattr("bapipe.profiler.prepare.describe", lambda device: small)
    told: list[str] = []
    made = profile(nn.Sequential(nn.Linear(6, 6)), 6, progress=lambda done, total, what: told.append(what))
    assert ("sum_over_whole" in made.environment) is not alone
    assert ("layers one by one at micro-batch size 4" in told) is alone


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_model_that_was_profiled_is_freed(layer_by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the stash of its passes, in which operators save their own outputs, as relu does."""
    graphs: list[weakref.ref[nn.Module]] = []
    instrument = InstrumentedModel.__post_init__

    def noted(instrumented: InstrumentedModel) -> None:
        instrument(instrumented)
        graphs.append(weakref.ref(instrumented.module))

    monkeypatch.setattr(InstrumentedModel, "__post_init__", noted)
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5))
    kept = weakref.ref(module)
    profile(module, 6, layer_by_layer=layer_by_layer)
    del module
    gc.collect()
    assert kept() is None
    assert [graph() for graph in graphs] == [None] * len(graphs)


class Detached(nn.Module):
    """No gradient passes `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.b(self.a(x).detach()))
        return y


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_layers_that_no_gradient_reaches_have_no_backward(layer_by_layer: bool) -> None:
    made = profile(Detached(), 6, layer_by_layer=layer_by_layer)
    a, b, head = (m for _, m in list(layers(made).values())[:3])
    assert made.layers[0].no_gradient == made.layers[0].outputs
    assert a.input_grad_ns == b.input_grad_ns == 0
    assert head.input_grad_ns > 0
    assert b.weight_grad_ns > 0
    assert layer_by_layer or a.whole_backward_ns == 0  # though it is like b


def test_a_default_device_is_for_the_users_code_only() -> None:
    """`torch.set_default_device("cuda")` is common; on the meta device a tensor of bapipe's own would have no values."""
    module, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(2, 2)
    with torch.device("meta"):
        made = bapipe.profile(module, (x,), x, functional.mse_loss, microbatch_sizes=(2,), settings=Settings(threads=1))
    assert len(made.layers) == 4


def test_a_profile_has_the_kind_of_device_that_it_is_given() -> None:
    def kind_of(kind: str | None) -> str:
        x = torch.ones(1, 2)
        made = bapipe.profile(nn.Linear(2, 2), (x,), x, functional.mse_loss, microbatch_sizes=(1,), kind=kind)
        return made.device.kind

    assert [kind_of(kind) for kind in (None, "cpu", "cpu-old")] == ["cpu", "cpu", "cpu-old"]
    with pytest.raises(
        BapipeError, match=r"^`kind` is 'cuda-old': want 'cpu', as the device is one, or a name that begins"
    ):
        kind_of("cuda-old")


def test_threads_take_turns_to_profile() -> None:
    """What one of them replaces in torch would be met by the forwards of the other."""
    told: list[int] = []
    made: list[int] = []

    def progress(done: int, num: int, name: str) -> None:
        told.append(threading.get_ident())
        time.sleep(0.02)  # so that another thread would have its turn

    def run() -> None:
        module, x = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1), nn.Linear(3, 2)), torch.randn(2, 2)
        made.append(
            len(bapipe.profile(module, (x,), x, functional.mse_loss, microbatch_sizes=(2,), progress=progress).layers)
        )

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [4, 4, 4]
    assert len([ident for ident, _ in groupby(told)]) == 3


class Counting(nn.Module):
    """Counts its calls in a buffer, beside modules inside."""

    calls: Tensor

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y: Tensor = self.inside(x)
        return y


def test_modules_without_layers_worth_cutting_are_one_layer_without_a_word() -> None:
    made = profile(nn.Sequential(Counting(nn.Tanh()), Counting(nn.Linear(6, 5))), 6)
    assert [layer.name for layer in made.layers] == ["0", "1", "loss"]
    reasons = made.environment["one_layer"]
    assert isinstance(reasons, dict)
    assert list(reasons) == ["1"]
