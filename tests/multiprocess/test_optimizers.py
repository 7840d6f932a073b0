"""Optimizers by name, learning rates over the steps, and gradients clipped by the norm of the whole model's."""

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from bapipe.errors import BapipeError
from bapipe.formats.settings import Settings
from bapipe.runtime.optimizer import clip_grad_norm, optimizer_factory
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from bapipe.training.run import _check_optimizer
from bapipe.training.train_config import TrainConfig
from tests.multiprocess.runtime_cases import make_plan, mlp


@pytest.mark.usefixtures("alone")
def test_clipping_is_that_of_the_whole_model() -> None:
    torch.manual_seed(0)
    whole = mlp().double()
    part = copy.deepcopy(whole)
    layers = [layer.name for layer in trace(part, [torch.zeros(1, 6).double()]).layers]
    order = [["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"]]
    plan = make_plan(layers, (4,), (0, 0), order, 3, 2)
    adam = optimizer_factory("AdamW", 0.01, {"weight_decay": 0.1})
    pipeline = Pipeline(
        part,
        plan,
        loss=nn.functional.cross_entropy,
        inputs=[torch.zeros(1, 6).double()],
        optimizer=adam,
        clip_norm=0.05,
    )
    reference = torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        x, y = torch.randn(6, 6, dtype=torch.float64), torch.arange(6) % 5
        pipeline.set_learning_rate(0.01 * (step + 1))
        pipeline.step(x, target=y)
        reference.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        assert norm > 0.05
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        reference.step()
        for name, parameter in pipeline.named_parameters().items():
            torch.testing.assert_close(parameter, whole.get_parameter(name), atol=1e-12, rtol=0)


@pytest.mark.usefixtures("alone")
def test_gradients_below_the_maximum_norm_stay_as_they_are() -> None:
    gradient = torch.tensor([3.0, 4.0])
    for max_norm, left in ((10.0, [3.0, 4.0]), (2.5, [1.5, 2.0])):
        norm = clip_grad_norm([gradient], [gradient], max_norm, torch.device("cpu"), None)
        assert norm.item() == 5
        torch.testing.assert_close(gradient, torch.tensor(left))


@pytest.mark.usefixtures("alone")
def test_complex_gradients_are_clipped_as_torch_does() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, dtype=dtype)) for dtype in (torch.complex64, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = clip_grad_norm(gradients, gradients, 0.5, torch.device("cpu"), None)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(parameters, 0.5).item())
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_sparse_gradients_are_clipped_as_dense_ones(max_norm: float) -> None:
    """Row 0 was looked up twice: what counts is the sum (4, 6), and the norm of all is 11."""
    rows = torch.tensor([[4.0, 6.0], [0.0, 0.0], [5.0, 6.0]])
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), values, check_invariants=True)
    dense = torch.tensor([2.0, 2.0])
    gradients = [sparse, dense]
    norm = clip_grad_norm(gradients, gradients, max_norm, torch.device("cpu"), None)
    assert norm.item() == pytest.approx(11)  # 16 + 36 + 25 + 36 + 4 + 4 = 121
    scale = min(1.0, max_norm / 11)
    torch.testing.assert_close(sparse.to_dense(), rows * scale)
    torch.testing.assert_close(dense, torch.full((2,), 2.0 * scale))


@pytest.mark.usefixtures("alone")
def test_autocast_around_a_pipeline_without_it_is_refused() -> None:
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0"]], 2, 1)
    x = torch.randn(2, 4)

    def made(autocast: torch.dtype | None) -> Pipeline:
        module = nn.Sequential(nn.Linear(4, 4))
        given = (
            replace(plan, settings=Settings(autocast="bfloat16", threads=torch.get_num_threads())) if autocast else plan
        )
        return Pipeline(module, given, loss=nn.MSELoss(), inputs=[x], evaluates=True, autocast=autocast, check=False)

    without, with_its_own = made(None), made(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        for call in (without.step, without.evaluate):
            with pytest.raises(BapipeError, match=r"^torch.autocast is on around this call, but the Pipeline was made"):
                call(x, target=x)
        with_its_own.step(x, target=x)


@pytest.mark.usefixtures("alone")
def test_autocast_around_several_steps_keeps_no_casts_of_earlier_weights() -> None:
    """Inside of it torch keeps the cast of each parameter until the outermost context ends."""
    settings = Settings(autocast="bfloat16", threads=torch.get_num_threads())
    plan = replace(make_plan(["0", "1"], (), (0,), [["0F0", "0B0"]], 2, 1), settings=settings)
    x, target = torch.randn(2, 4), torch.tensor([0, 1])

    def losses(around: AbstractContextManager[object]) -> list[float | None]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        pipeline = Pipeline(
            module, plan, loss=nn.CrossEntropyLoss(), inputs=[x], evaluates=True, autocast=torch.bfloat16
        )
        with around:
            stepped = [pipeline.step(x, target=target) for _ in range(4)]
            found = pipeline.evaluate(x, target=target)
        assert found is not None
        return [*stepped, found.loss]

    outside = losses(nullcontext())
    assert len(set(outside)) == 5
    assert losses(torch.autocast("cpu", torch.bfloat16)) == outside


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_autocast_is_that_of_the_whole_model(recompute: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = mlp()
    part = copy.deepcopy(whole)
    x, y = torch.randn(6, 6), torch.arange(6) % 5
    layers = [layer.name for layer in trace(part, [x]).layers]
    order = [["0F0", "1F0", "0F1", "1F1", "1I0", "0B0", "1B1", "0B1", "1W0"]]
    plan = make_plan(layers, (5,), (0, 0), order, 3, 2, recompute)  # cut where the next layer narrows its input anyway
    pipeline = Pipeline(part, plan, loss=nn.functional.cross_entropy, inputs=[x], autocast=torch.bfloat16)
    got, want = pipeline.step(x, target=y), 0.0
    for inputs, target in zip(x.chunk(2), y.chunk(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(whole(inputs), target) / 2
        loss.backward()
        want += loss.item()
    assert got == pytest.approx(want, abs=1e-6)
    narrow = 0
    for name, parameter in pipeline.named_parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, atol=1e-7, rtol=1e-6)
        narrow += bool(torch.equal(parameter.grad.bfloat16().float(), parameter.grad))
    assert narrow < len(list(whole.parameters()))  # sums over micro-batches are kept in full


def test_a_run_has_a_step() -> None:
    with pytest.raises(BapipeError, match=r"^`steps` is 0: want at least 1$"):
        TrainConfig(steps=0)


@pytest.mark.usefixtures("alone")
def test_more_inputs_than_the_model_has_are_refused() -> None:
    part, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(4, 6)
    layers = [layer.name for layer in trace(part, [x]).layers]
    plan = make_plan(layers, (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(part, plan, loss=nn.functional.cross_entropy, inputs=[x])
    with pytest.raises(BapipeError, match=r"^2 inputs for a model that takes 1: want input; constants are"):
        pipeline.step(x, x, target=torch.zeros(4, dtype=torch.long))


def test_learning_rates() -> None:
    constant = TrainConfig(steps=10, warmup_steps=4)
    assert [constant.learning_rate_at(step, 0.5) for step in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    linear = TrainConfig(steps=6, warmup_steps=2, learning_rate_schedule="linear")
    assert [linear.learning_rate_at(step, 0.5) for step in range(6)] == [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]
    cosine = TrainConfig(steps=4, learning_rate_schedule="cosine")
    want = [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)]
    assert [cosine.learning_rate_at(step, 2.0) for step in range(4)] == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize(
    ("measured", "name", "arguments", "trained"),
    [
        ("sgd-momentum", None, {}, ("sgd", {"momentum": 0.9})),
        ("sgd", None, {}, ("sgd", {"momentum": 0})),
        ("adamw", None, {"weight_decay": 0.1}, ("adamw", {"weight_decay": 0.1})),
        ("sgd-momentum", None, {"nesterov": True}, ("sgd", {"momentum": 0.9, "nesterov": True})),
        ("sgd-momentum", "SGD", {"momentum": 0.5}, ("sgd", {"momentum": 0.5})),
        ("sgd-momentum", "SGD", {"weight_decay": 0.1}, ("sgd", {"momentum": 0.9, "weight_decay": 0.1})),
        ("sgd-momentum", "sgd-momentum", {}, ("sgd", {"momentum": 0.9})),
        ("sgd", "sgd", {}, ("sgd", {"momentum": 0})),
        ("adam", "Adam", {"eps": 0.1}, ("adam", {"eps": 0.1})),
        ("sgd-momentum", "RMSprop", {}, ("rmsprop", {})),  # profiles do not know it
    ],
)
def test_a_run_trains_with_the_profiled_settings(measured: str, name: str | None, arguments: Any, trained: Any) -> None:
    config, settings = TrainConfig(optimizer=name, optimizer_arguments=arguments), Settings(optimizer=measured)
    assert config.optimizer_for(settings) == trained
    _check_optimizer(settings, config)  # must not raise


def test_another_optimizer_than_the_profiled_is_refused() -> None:
    with pytest.raises(BapipeError) as caught:
        _check_optimizer(Settings(), TrainConfig(optimizer="adam"))
    assert str(caught.value) == (
        "the plan is for a model that was measured with optimizer sgd-momentum; this run computes with optimizer adam: "
        "leave `optimizer` out, or profile with the settings of the run, and plan again"
    )
    with pytest.raises(BapipeError, match=r"optimizer sgd: leave `momentum` out of `optimizer_arguments`, or profile"):
        _check_optimizer(Settings(), TrainConfig(optimizer_arguments={"momentum": 0}))
    with pytest.raises(
        BapipeError, match=r"optimizer sgd; this run .* optimizer sgd-momentum: leave `optimizer` out, "
    ):
        _check_optimizer(Settings(optimizer="sgd"), TrainConfig(optimizer="sgd-momentum"))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(BapipeError, match=r"^torch.optim has no optimizer 'adamm'; did you mean 'adam'\?$"):
        optimizer_factory("adamm", 0.1, {})
    with pytest.raises(
        BapipeError, match=r"^adam cannot be made with lr=0.1 and beta=3: .*unexpected keyword argument 'beta'$"
    ):
        optimizer_factory("adam", 0.1, {"beta": 3})
    with pytest.raises(BapipeError, match=r"^no schedule of the learning rate 'step': want constant, linear, cosine$"):
        TrainConfig(learning_rate_schedule="step")
    with pytest.raises(BapipeError, match=r"^gradients cannot be clipped to a norm of 0.0: want more than 0$"):
        TrainConfig(steps=1, clip_norm=0)
    with pytest.raises(BapipeError, match=r"^`warmup_steps` is -1: want at least 0$"):
        TrainConfig(steps=1, warmup_steps=-1)
