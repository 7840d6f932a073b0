"""Errors of models that cannot be measured: they name the layer, and a remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.errors import BapipeError, InvalidModel
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.tracing.layers import trace
from bapipe.tracing.stages import cut_into_stages
from tests.models.small_modules import profile


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
            "compute it from a tensor in the layer that uses it",
        ),
        (meta, "Sequential is on the meta device, so it cannot run: build it on a real one"),
        (
            lambda: torch.compile(nn.Linear(6, 5)),
            "the module is compiled by torch.compile, so it has no layers to cut between: give the module that it was made from",
        ),
        (nn.ReLU, "ReLU has no parameter to train: set requires_grad on those to train"),
        (
            Branching,
            "Branching cannot be traced: it uses values of tensors, which are not known while it is traced "
            f"({__name__}, line {BRANCH}: if y.sum() > 0:); put this code into a module of its own, which is then one "
            "layer",
        ),
        (
            lambda: nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 3)),
            "layer 'loss' failed in its forward at micro-batch size 4: IndexError: Target 4 is out of bounds.",
        ),
    ],
)
def test_errors_name_the_layer(make: Callable[[], nn.Module], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidModel) as error:
        profile(make(), 6)
    assert str(error.value) == message
    assert capsys.readouterr().err == ""  # nothing of torch's own


class Averaging(nn.Module):
    """Returns a number that is read from values, which shows when it has run; and the results of one layer or two."""

    def __init__(self, returns_first: bool) -> None:
        super().__init__()
        self.a, self.b, self.returns_first = nn.Linear(6, 6), nn.Linear(6, 5), returns_first

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = self.a(x)
        z = self.b(y)
        return (z, torch.ones_like(z).mean().item(), *((y,) if self.returns_first else ()))


@pytest.mark.parametrize(
    ("returns_first", "check", "said"),
    [
        (False, True, "the model returns 'b:item', of type float, which is neither a tensor of its layers nor a const"),
        (True, True, "a stage hands on or returns a value of type float, which is no tensor: return tensors"),
        (True, False, "layer 'b' gives other layers 1.0 (float); only tensors can cross between layers"),
    ],
)
def test_a_number_that_depends_on_values_cannot_be_returned(returns_first: bool, check: bool, said: str) -> None:
    with pytest.raises(InvalidModel) as error:
        measure_model(
            Averaging(returns_first),
            (torch.randn(1, 6),),
            torch.tensor([4]),
            lambda output, target: functional.cross_entropy(output[0], target),
            ProfileOptions(microbatch_sizes=(4,), seconds_per_size=0.0, check=check),
            name="averaging",
        )
    assert str(error.value).startswith(said)


class Greedy(nn.Identity):
    """Allocates more memory than the machine has if a batch is larger than 2."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input + torch.empty(10**15 if len(input) > 2 else 0).sum()


def test_measurements_before_memory_ran_out_are_saved() -> None:
    Greedy.__module__ = "torch.nn.own"  # a layer, to the tracer
    saved: list[ModelProfile] = []
    with pytest.raises(InvalidModel) as error:
        profile(nn.Sequential(nn.Linear(6, 6), Greedy(), nn.Linear(6, 5)), 6, sizes=(1, 2, 4), save=saved.append)
    assert str(error.value) == (
        "layer '1' ran out of memory in its forward at micro-batch size 4: measure smaller `microbatch_sizes`, "
        "or one layer at a time with `layer_by_layer`"
    )
    assert saved[-1].microbatch_sizes == (1, 2)


def test_a_batch_that_does_not_fit_in_memory() -> None:
    with pytest.raises(
        BapipeError, match=r"^no memory for a batch of 1000000000000000 samples: measure smaller `microbatch_sizes`"
    ):
        profile(nn.Sequential(nn.Linear(6, 5)), 6, sizes=(10**15,))


class FailsItself(nn.Module):
    """Fails after it has read a shape, behind which a number is used in another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = self.a(x).shape
        z: Tensor = self.b(x.permute(0, 2, 1)).reshape(rows, width)
        return z


def test_what_a_model_itself_raises_is_said() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(RuntimeError) as plain:
        FailsItself()(x)
    line = FailsItself.forward.__code__.co_firstlineno + 2
    expected = f"FailsItself itself fails at micro-batch size 4: RuntimeError: {plain.value} ({__name__}, line {line}: "
    with pytest.raises(InvalidModel) as refused:
        profile(FailsItself(), 6)
    assert str(refused.value).startswith(expected)


class Conditional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


@pytest.mark.parametrize("check", [True, False])
def test_control_flow_of_torch_is_refused_in_words(check: bool) -> None:
    line = Conditional.forward.__code__.co_firstlineno + 1
    words = rf"^the model calls .*`torch\.cond` \({__name__}, line {line}: .*torch\.where"
    with pytest.raises(InvalidModel, match=words):
        profile(nn.Sequential(nn.Linear(6, 6), Conditional(6, 5)), 6, check=check)


def test_control_flow_of_torch_is_refused_in_words_by_a_pass_for_shapes() -> None:
    model = trace(nn.Sequential(nn.Linear(6, 6), Conditional(6, 5)), [torch.randn(4, 6)])
    with pytest.raises(InvalidModel, match=r"^the model calls .*`torch\.cond`"):
        cut_into_stages(model, {"0": 0, "1": 1}, [torch.randn(4, 6)], 2)


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
            made: Tensor = FailsBackward.apply(input)
            return made

    Bad.__module__ = "torch.nn.own"  # a layer, to the tracer
    with pytest.raises(InvalidModel) as error:
        profile(Model(), 6)
    assert str(error.value) == ("layer 'bad' failed in its backward at micro-batch size 4: RuntimeError: no way back")


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ((), {}, "no micro-batch size to measure at: give one or more, such as 1,2,4,8"),
        ((2, 0), {}, "micro-batch size 0 cannot be measured: want 1 or more"),
        (
            (1,),
            {"optimizer": "lion"},
            "unknown optimizer 'lion'; want one of sgd, sgd-momentum, adam, adamw in "
            "`settings=bapipe.Settings(optimizer=...)`",
        ),
        (
            (1,),
            {"optimizer": "AdamW"},
            "unknown optimizer 'AdamW'; want one of sgd, sgd-momentum, adam, adamw in "
            "`settings=bapipe.Settings(optimizer=...)`; did you mean 'adamw'?",
        ),
    ],
)
def test_wrong_arguments(sizes: tuple[int, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError) as error:
        measure_model(
            nn.Linear(2, 2),
            (torch.randn(1, 2),),
            torch.zeros(1, dtype=torch.int64),
            functional.cross_entropy,
            ProfileOptions(microbatch_sizes=sizes, settings=Settings(**settings)),
            name="small",
        )
    assert str(error.value) == message


def test_a_layer_that_fails_alone_is_named() -> None:
    with pytest.raises(InvalidModel) as error:
        profile(nn.Sequential(nn.Linear(6, 6), nn.Linear(7, 5)), 6, layer_by_layer=True)
    assert str(error.value) == (
        "layer '1' failed in its forward at micro-batch size 4: RuntimeError: "
        "mat1 and mat2 shapes cannot be multiplied (4x6 and 7x5)"
    )


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
            "needs: set inplace=False in that layer, or compute a new tensor there (one of the variables needed for "
            "gradient computation has been modified by an inplace operation: [torch.FloatTensor [4, 6]], which is output "
            "0 of Sigmoid",
        ),
        (
            nn.Sequential(nn.Linear(6, 5)),
            (torch.randn(1, 6),),
            no_gradient,
            "the loss has no gradient, so nothing would be trained: look for torch.no_grad() or detach() in the "
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
            "input 0 is [1.0, 2.0] (list); examples must be tensors, batch first, or constants (numbers, flags, texts, None): keep other values inside the module",
        ),
        (
            nn.Sequential(nn.Linear(6, 5)),
            (torch.tensor(1.0),),
            functional.cross_entropy,
            "input 0 has shape (): want an example of one sample or more, batch first",
        ),
    ],
)
def test_unmeasurable_models_give_a_reason(
    module: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[[Tensor, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(InvalidModel) as error:
        measure_model(module, inputs, torch.tensor([4]), loss, ProfileOptions(microbatch_sizes=(4,), seconds_per_size=0.0), name="small")  # fmt: skip
    assert str(error.value).startswith(message)
