"""Profiles of small modules whose bytes are counted by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe import codec
from bapipe.errors import BapipeError, InvalidModel
from bapipe.measure.layers import measure
from bapipe.measure.timing import spread
from bapipe.measure.watch import Subject, Watched, parameters_of
from bapipe.profile import LayerMeasurement, LayerProfile, ModelProfile
from bapipe.settings import Settings
from bapipe.trace import trace


def profile(module: nn.Module, *shape: int) -> ModelProfile:
    return measure(
        module,
        (torch.randn(1, *shape),),
        torch.zeros(1, dtype=torch.int64),
        functional.cross_entropy,
        microbatch_sizes=(4,),
        name="small",
        seconds_per_size=0.0,
    )


def layers(made: ModelProfile) -> dict[str, tuple[LayerProfile, LayerMeasurement]]:
    return {layer.name: (layer, m) for layer, m in zip(made.layers, made.measurements[0].layers, strict=True)}


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
    assert found["1"][0].param_bytes == 4 * 2 * 5  # running statistics are no parameters


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(3, 3), nn.LSTM(3, 7, batch_first=True), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(self.embed(x))[0][:, -1])
        return y


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="other processors have other LSTMs")
def test_lstm_keeps_states_and_its_own_workspace() -> None:
    found = layers(profile(Reader(), 6, 3))
    lstm = nn.LSTM(3, 7)
    state = torch.zeros(4, 7)
    made = torch.mkldnn_rnn_layer(
        torch.zeros(6, 4, 3), *lstm.parameters(), state, state, False, [], 2, 7, 1, True, False, False, True
    )
    kept = 4 * 6 * 4 * (3 + 7) + 4 * 4 * 4 * 7  # its input and output; both states before and after
    assert found["lstm"][1].stash_bytes == kept + made[3].nbytes
    assert found["lstm"][1].gradient_stash_bytes == 4 * 6 * 4 * 7  # of all its outputs, of which one was used
    assert found["head"][1].stash_bytes == 0  # it reads the LSTM's output
    assert found["embed"][1].stash_bytes == 4 * 4 * 6 * 3


class Branches(nn.Module):
    """b and c read one storage, and one gradient reaches both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.head(self.b(y) + self.c(y[:, :]))
        return z


def test_a_storage_counts_once_however_many_layers_save_it() -> None:
    found = layers(profile(Branches(), 6))
    assert [m.stash_bytes for _, m in found.values()][:4] == [96, 96, 0, 96]
    assert [m.gradient_stash_bytes for _, m in found.values()][:4] == [96, 96, 0, 80]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        y: Tensor = self.head(self.b(self.a(x)) * mask)
        return y


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


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.b(y) * (y[:, :5] > 0)
        return z


def test_outputs_without_gradient_are_named() -> None:
    a = layers(profile(Masked(), 6))["a"][0]
    assert len(a.outputs) == 2
    assert a.no_gradient == (a.outputs[1],)


def test_a_profile_decodes_to_itself_and_the_module_is_left_alone() -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    told: list[tuple[int, int, str]] = []
    made = measure(
        module,
        (torch.randn(2, 3, 6, 6),),
        torch.tensor([0, 1]),
        nn.CrossEntropyLoss(),
        microbatch_sizes=(4, 1),
        name="small",
        factory="own:net",
        arguments={"width": 3},
        seconds_per_size=0.0,
        progress=lambda done, total, what: told.append((done, total, what)),
    )
    assert codec.decode(codec.encode(made)) == made
    assert made.microbatch_sizes == (1, 4)
    assert made.layers[-1].kind == "CrossEntropyLoss"
    assert (made.dtype, made.device.kind, made.factory, made.arguments) == ("float32", "cpu", "own:net", {"width": 3})
    assert told[0] == (0, 5, "times at micro-batch size 1")
    assert told[-1] == (5, 5, "done")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.b(y) / y.size(0) ** 2
        return z


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:
            y = y * 2
        z: Tensor = self.b(y)
        return z


BRANCH = Branching.forward.__code__.co_firstlineno + 2


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise RuntimeError("no way back")


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(7, 5)),
            "layer '1' failed in its forward at micro-batch size 4: RuntimeError: "
            "mat1 and mat2 shapes cannot be multiplied (4x6 and 7x5)",
        ),
        (
            Sized,
            "layer 'a' gives other layers 16 (int); only tensors can cross between layers: "
            "compute it from a tensor where it is used",
        ),
        (meta, "Sequential is on the meta device, so it cannot run: build it on a real one"),
        (nn.ReLU, "ReLU has no parameter to train: set requires_grad on those to train"),
        (
            Branching,
            "Branching cannot be traced: symbolically traced variables cannot be used as inputs to control flow "
            f"({__name__}, line {BRANCH}); torch.export fails too: Could not guard on data-dependent expression "
            "Eq(u0, 1) (unhinted: Eq(u0, 1)). (Size-like symbols: none); its forward is traced without values, so it "
            "cannot branch on tensors: put such code into a module of its own, which is then one layer",
        ),
        (
            lambda: nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 3)),
            "layer 'loss' failed in its forward at micro-batch size 4: IndexError: Target 4 is out of bounds.",
        ),
    ],
)
def test_errors_name_the_layer(make: Callable[[], nn.Module], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidModel) as error:
        measure(
            make(),
            (torch.randn(1, 6),),
            torch.tensor([4]),
            functional.cross_entropy,
            microbatch_sizes=(4,),
            name="small",
            seconds_per_size=0.0,
        )
    assert str(error.value) == message
    assert capsys.readouterr().err == ""  # nothing of torch's own


class Greedy(nn.Identity):
    """Asks for more memory than there is where a batch is larger than 2."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input + torch.empty(10**15 if len(input) > 2 else 0).sum()


def test_what_was_measured_before_memory_ran_out_is_kept() -> None:
    Greedy.__module__ = "torch.nn.own"  # a layer, to the tracer
    kept: list[ModelProfile] = []
    with pytest.raises(InvalidModel) as error:
        measure(
            nn.Sequential(nn.Linear(6, 6), Greedy(), nn.Linear(6, 5)),
            (torch.randn(1, 6),),
            torch.tensor([4]),
            functional.cross_entropy,
            microbatch_sizes=(1, 2, 4),
            name="small",
            seconds_per_size=0.0,
            keep=kept.append,
        )
    assert str(error.value) == (
        "layer '1' ran out of memory in its forward at micro-batch size 4: measure smaller sizes with --microbatch-size, "
        "or layer by layer with --layer-by-layer"
    )
    assert kept[-1].microbatch_sizes == (1, 2)


def test_a_batch_that_fits_nowhere() -> None:
    with pytest.raises(BapipeError, match=r"^no memory for a batch of 1000000000000000 samples: measure smaller sizes"):
        measure(
            nn.Sequential(nn.Linear(6, 5)),
            (torch.randn(1, 6),),
            torch.tensor([4]),
            functional.cross_entropy,
            microbatch_sizes=(10**15,),
            name="small",
        )


@pytest.mark.parametrize(
    ("optimizer", "state"), [("sgd", 0), ("sgd-momentum", 168), ("adam", 2 * 168 + 2 * 4), ("adamw", 2 * 168 + 2 * 4)]
)
def test_optimizer_state(optimizer: str, state: int) -> None:
    """Adam keeps two values for each parameter, and a step count for each tensor."""
    made = measure(
        nn.Sequential(nn.Linear(6, 6)),
        (torch.randn(1, 6),),
        torch.tensor([4]),
        functional.cross_entropy,
        microbatch_sizes=(4,),
        name="small",
        settings=Settings(optimizer=optimizer),
        seconds_per_size=0.0,
    )
    assert (made.layers[0].param_bytes, made.layers[0].optimizer_state_bytes) == (168, state)


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
    subject = Subject(model=trace(module, inputs), loss=functional.cross_entropy, inputs=inputs, target=target)
    reported: list[int] = []
    watched = Watched(subject=subject, enter=reported.append)
    for _ in range(2):  # gradients add up
        functional.cross_entropy(module(*inputs), target).backward()  # type: ignore[no-untyped-call]
    want = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    for _ in range(2):
        groups = watched.backward_inputs(watched.forward())
        assert any(group.kept for group in groups)
        reported.clear()
        watched.backward_weights(groups)
        with_parameters = {i for i, own in enumerate(parameters_of(subject.model)) if own}
        assert set(reported) <= with_parameters
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], rtol=1e-12, atol=1e-14)


def test_the_spread_of_a_median() -> None:
    assert spread([100, 90, 130]) == (130 - 90) / 2 / 100  # few values: all of them
    assert spread([10] * 9 + [99]) == 0.0  # of ten, the second to the ninth
    assert spread([1, *range(100, 124), 10**6]) == (116 - 107) / 2 / 111.5  # of 26, the ninth to the eighteenth
    assert spread([0, 0, 0]) == 0.0


def test_an_error_in_a_backward_names_the_layer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.bad, self.b = nn.Linear(6, 6), Bad(), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.bad(self.a(x)))
            return y

    class Bad(nn.Identity):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            made: Tensor = FailsBackward.apply(input)  # type: ignore[no-untyped-call]
            return made

    Bad.__module__ = "torch.nn.own"  # a layer, to the tracer
    with pytest.raises(InvalidModel) as error:
        profile(Model(), 6)
    assert str(error.value) == ("layer 'bad' failed in its backward at micro-batch size 4: RuntimeError: no way back")


@pytest.mark.parametrize(
    ("sizes", "optimizer", "message"),
    [
        ((), "sgd-momentum", "no micro-batch size to measure at: give one or more, such as 1,2,4,8"),
        ((2, 0), "sgd-momentum", "micro-batch size 0 cannot be measured: want 1 or more"),
        ((1,), "lion", "unknown optimizer 'lion'; want one of sgd, sgd-momentum, adam, adamw"),
    ],
)
def test_wrong_arguments(sizes: tuple[int, ...], optimizer: str, message: str) -> None:
    with pytest.raises(BapipeError) as error:
        measure(
            nn.Linear(2, 2),
            (torch.randn(1, 2),),
            torch.zeros(1, dtype=torch.int64),
            functional.cross_entropy,
            microbatch_sizes=sizes,
            name="small",
            settings=Settings(optimizer=optimizer),
        )
    assert str(error.value) == message


def test_settings_are_those_measured_under_and_leave_no_trace() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    made = measure(
        module,
        (torch.randn(1, 3, 8, 8),),
        torch.zeros(1, dtype=torch.int64),
        functional.cross_entropy,
        microbatch_sizes=(4,),
        name="small",
        settings=Settings(autocast="bfloat16", channels_last=True),
        seconds_per_size=0.0,
    )
    assert made.settings == Settings(dtype="float32", autocast="bfloat16", channels_last=True)
    found = layers(made)
    assert found["0"][1].output_bytes == (2 * 4 * 8 * 8 * 8,)  # bfloat16
    # the batch and the weights, both as bfloat16: autocast makes them anew
    assert found["0"][1].stash_bytes == 2 * 4 * 3 * 8 * 8 + 2 * 8 * 3 * 3 * 3
    assert module[0].weight.is_contiguous()  # type: ignore[union-attr, operator]
    assert not torch.is_autocast_enabled("cpu")


class Blocks(nn.Module):
    """Three equal blocks, two of which have equal layers with other weights; the third gives another type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.relus = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(3))
        self.pool, self.flatten, self.head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for convolution, norm, relu in zip(self.convolutions, self.norms, self.relus, strict=True):
            x = x + relu(norm(convolution(x)))
        scores: Tensor = self.head(self.flatten(self.pool(x)))
        return scores


@pytest.mark.parametrize(
    ("make", "shape"), [(Blocks, (3, 8, 8)), (Reader, (6, 3)), (Branches, (6,)), (Tied, (6,)), (Masked, (6,))]
)
def test_layers_one_by_one_take_the_bytes_of_the_whole(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = make()
    whole = profile(module, *shape)
    alone = measure(
        module,
        (torch.randn(1, *shape),),
        torch.zeros(1, dtype=torch.int64),
        functional.cross_entropy,
        microbatch_sizes=(4,),
        name="small",
        seconds_per_size=0.0,
        layer_by_layer=True,
    )
    assert [(a.name, a.inputs, a.outputs, a.no_gradient) for a in alone.layers] == [
        (b.name, b.inputs, b.outputs, b.no_gradient) for b in whole.layers
    ]
    at_whole, at_alone = whole.measurements[0].layers, alone.measurements[0].layers
    assert [m.output_bytes for m in at_alone] == [m.output_bytes for m in at_whole]
    assert [m.stash_bytes for m in at_alone] == [m.stash_bytes for m in at_whole]
    assert all(m.forward_ns > 0 and m.whole_backward_ns > 0 for m in at_alone)
    assert at_alone[0].input_grad_ns == 0
    assert all(m.input_grad_ns > 0 for m in at_alone[1:])


@pytest.mark.parametrize("layer_by_layer", [False, True])
@pytest.mark.parametrize(("exhaustive", "num_kinds"), [(False, 8), (True, 14)])
def test_equal_layers_are_measured_once(exhaustive: bool, num_kinds: int, layer_by_layer: bool) -> None:
    """Of the three blocks only the first convolution, norm and ReLU with its sum; four more layers and the loss."""
    made = measure(
        Blocks(),
        (torch.randn(1, 3, 8, 8),),
        torch.zeros(1, dtype=torch.int64),
        functional.cross_entropy,
        microbatch_sizes=(4,),
        name="small",
        seconds_per_size=0.0,
        layer_by_layer=layer_by_layer,
        exhaustive=exhaustive,
    )
    assert len(made.layers) == 14
    assert made.environment["kinds_of_layers"] == {"4": num_kinds}
    a, b = (layers(made)[f"convolutions.{i}"][1] for i in (0, 2))
    same = (a.forward_ns, a.backward_ns, a.spread) == (b.forward_ns, b.backward_ns, b.spread)
    assert same is not exhaustive


class Looking(nn.Identity):
    """Notes how many parameters of the model have gradients when it runs."""

    model: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.found.append(sum(p.grad is not None for p in self.model.parameters()))
        return input.clone()


def test_layers_one_by_one_leave_no_gradients() -> None:
    Looking.__module__ = "torch.nn.own"  # a layer, to the tracer
    looking = Looking()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), looking, nn.Linear(6, 5))
    object.__setattr__(looking, "model", model)  # not as a module of its own
    measure(
        model,
        (torch.randn(1, 6),),
        torch.tensor([4]),
        functional.cross_entropy,
        microbatch_sizes=(4,),
        name="small",
        seconds_per_size=0.0,
        layer_by_layer=True,
    )
    assert len(looking.found) > 3
    assert set(looking.found) == {0}


def test_a_layer_that_fails_alone_is_named() -> None:
    with pytest.raises(InvalidModel) as error:
        measure(
            nn.Sequential(nn.Linear(6, 6), nn.Linear(7, 5)),
            (torch.randn(1, 6),),
            torch.tensor([4]),
            functional.cross_entropy,
            microbatch_sizes=(4,),
            name="small",
            layer_by_layer=True,
        )
    assert str(error.value) == (
        "layer '1' failed in its forward at micro-batch size 4: RuntimeError: "
        "mat1 and mat2 shapes cannot be multiplied (4x6 and 7x5)"
    )


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
    made = measure(
        Detached(),
        (torch.randn(1, 6),),
        torch.tensor([4]),
        functional.cross_entropy,
        microbatch_sizes=(4,),
        name="small",
        seconds_per_size=0.0,
        layer_by_layer=layer_by_layer,
    )
    a, b, head = (m for _, m in list(layers(made).values())[:3])
    assert made.layers[0].no_gradient == made.layers[0].outputs
    assert a.input_grad_ns == b.input_grad_ns == 0
    assert head.input_grad_ns > 0
    assert b.weight_grad_ns > 0


class Overwrites(nn.Module):
    """The second layer changes what the first one's backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.squash, self.relu, self.head = (
            nn.Linear(6, 6),
            nn.Sigmoid(),
            nn.ReLU(inplace=True),
            nn.Linear(6, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.relu(self.squash(self.a(x))))
        return y


def no_gradient(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.detach(), target)


def each(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize(
    ("module", "inputs", "loss", "message"),
    [
        (
            Overwrites(),
            (torch.randn(1, 6),),
            functional.cross_entropy,
            "layer 'squash' failed in its backward at micro-batch size 4: a layer changes in place what its backward "
            "needs: set inplace=False where that is, or compute a new tensor there (one of the variables needed for "
            "gradient computation has been modified by an inplace operation: [torch.FloatTensor [4, 6]], which is output "
            "0 of Sigmoid",
        ),
        (
            nn.Sequential(nn.Linear(6, 5)),
            (torch.randn(1, 6),),
            no_gradient,
            "no gradient leaves the loss, so nothing would be trained: look for torch.no_grad() or detach() in the "
            "model's last layers or in the loss",
        ),
        (
            nn.Sequential(nn.Linear(6, 5)),
            (torch.randn(1, 6),),
            each,
            "the loss must be a scalar tensor, the mean over the batch; it gives shape (4,)",
        ),
        (
            nn.Sequential(nn.Linear(6, 5)),
            ([1.0, 2.0],),
            functional.cross_entropy,
            "input 0 is [1.0, 2.0] (list); examples must be tensors, batch first: keep what is no tensor inside the module",
        ),
        (
            nn.Sequential(nn.Linear(6, 5)),
            (torch.tensor(1.0),),
            functional.cross_entropy,
            "input 0 has shape (): want an example of one sample or more, batch first",
        ),
    ],
)
def test_what_cannot_be_measured_says_why(
    module: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[[Tensor, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(InvalidModel) as error:
        measure(
            module, inputs, torch.tensor([4]), loss, microbatch_sizes=(4,), name="small", seconds_per_size=0.0
        )  # fmt: skip
    assert str(error.value).startswith(message)
