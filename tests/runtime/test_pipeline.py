"""What a pipeline is given that it cannot use, in one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.errors import BapipeError, InvalidModel
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from tests.multiprocess.runtime_cases import make_plan

X, Y = torch.randn(4, 3), torch.randn(4, 3)


def pipelined(module: nn.Module | None = None, **options: Any) -> Pipeline:
    plan = make_plan(["0", "1"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    module = module or nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return Pipeline(module, plan, loss=mse_loss, inputs=(X,), **options)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": -1.0}, "gradients cannot be clipped to a norm of -1.0: want more than 0"),
        ({"clip_norm": float("nan")}, "gradients cannot be clipped to a norm of nan: want more than 0"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)},
            "`optimizer` is an object of type SGD; want a function that makes the optimizer of a stage's parameters, such "
            "as lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        ),
        (
            {"optimizer": "sgd"},
            "`optimizer` is 'sgd'; want a function that makes the optimizer of a stage's parameters, such as lambda "
            "parameters: torch.optim.SGD(parameters, lr=0.1)",
        ),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        pipelined(**options)
    assert str(caught.value) == message


@pytest.mark.usefixtures("alone")
def test_initial_values_are_compared_over_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[nn.Module] = []
    monkeypatch.setattr(
        "bapipe.runtime.rank_stages.warn_of_unlike_values", lambda module, group: compared.append(module)
    )
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    pipelined(module)
    assert compared == [module]


@pytest.mark.usefixtures("alone")
def test_a_loss_and_a_plan_are_objects() -> None:
    module, plan = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), make_plan(["0", "1"], (), (0,), [["0F0", "0B0"]], 4, 1)
    with pytest.raises(
        InvalidModel, match=r"^the loss is the class MSELoss: want an object of it, such as MSELoss\(\)$"
    ):
        Pipeline(module, plan, loss=nn.MSELoss, inputs=(X,))  # type: ignore[arg-type]
    with pytest.raises(BapipeError, match=r"^'plan.json' is no plan"):
        Pipeline(module, "plan.json", loss=mse_loss, inputs=(X,))  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_inputs_are_those_of_the_module() -> None:
    module, plan = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), make_plan(["0", "1"], (), (0,), [["0F0", "0B0"]], 4, 1)
    with pytest.raises(InvalidModel, match=r"^the example inputs are one tensor of shape \[4, 3\]: put it in a tuple"):
        Pipeline(module, plan, loss=mse_loss, inputs=X)  # type: ignore[arg-type]
    with pytest.raises(InvalidModel, match=r"^bucket 0 is a Tensor: want a tuple of 1"):
        Pipeline(module, plan, loss=mse_loss, inputs=(X,), buckets=[X])  # type: ignore[list-item]


@pytest.mark.usefixtures("alone")
def test_a_default_device_is_for_the_users_code_only() -> None:
    with torch.device("meta"):
        pipeline = pipelined()
        loss = pipeline.step(X, target=Y)
    assert loss is not None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("of_all", "warns"), [(True, True), (False, False)])
def test_a_module_in_evaluation_mode_is_warned_of(of_all: bool, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    (module if of_all else module[1]).eval()
    pipelined(module)
    assert ("the module is in evaluation mode" in caplog.text) == warns
    assert not module[1].training


class InPlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shifts = nn.Linear(3, 3), [nn.Parameter(torch.ones(3))]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.shifts[0]


@pytest.mark.usefixtures("alone")
def test_parameters_in_plain_lists_are_warned_of_once_and_not_trained(caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan(["layer"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    module = InPlainList()
    whole = copy.deepcopy(module)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=(X,), optimizer=sgd(0.1, momentum=0))
    for _ in range(3):
        optimizer.zero_grad()
        loss = mse_loss(whole(X), Y)
        loss.backward()
        optimizer.step()
        assert pipeline.step(X, target=Y) == pytest.approx(loss.item(), rel=1e-5)
    assert sorted(pipeline.named_parameters()) == ["layer.bias", "layer.weight"]
    assert torch.equal(module.shifts[0], torch.ones(3))
    assert caplog.messages == [
        "the list 'shifts' holds parameters that are none of the model's, so they are not trained: torch sees those of "
        "nn.ModuleList, nn.ModuleDict, nn.ParameterList and nn.ParameterDict"
    ]


class WithoutAutocast(nn.Module):
    """Calls a layer outside of autocast only, in which it was profiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y if torch.is_autocast_enabled("cpu") else self.extra(y)


@pytest.mark.usefixtures("alone")
def test_training_and_evaluation_have_the_layers_of_a_profile_without_autocast() -> None:
    plan = make_plan(["first", "extra"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    options = {"autocast": torch.bfloat16, "evaluates": True, "check": False}
    pipeline = Pipeline(WithoutAutocast(), plan, loss=mse_loss, inputs=(X,), **options)  # type: ignore[arg-type]
    result = pipeline.evaluate(X, target=Y)
    assert result is not None
    assert result.loss == pytest.approx(pipeline.step(X, target=Y))


def test_a_pipeline_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(BapipeError) as caught:
        pipelined()
    assert str(caught.value) == (
        "there is no process group: call torch.distributed.init_process_group in every process before, or train with "
        "bapipe.run, which starts the processes"
    )


@pytest.mark.usefixtures("alone")
def test_a_parameter_without_a_shape_is_refused_before_settings_are_compared() -> None:
    plan = make_plan(["0", "1"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    plan = structs.replace(plan, settings=plan.compute_settings)
    with pytest.raises(InvalidModel) as caught:
        Pipeline(nn.Sequential(nn.LazyLinear(3), nn.Tanh()), plan, loss=mse_loss, inputs=(X,))
    assert str(caught.value) == "'0.weight' has no shape yet: call the module once, on any samples, where it is made"


@pytest.mark.usefixtures("alone")
def test_buckets_are_numbered_from_zero() -> None:
    plain, bucketed = pipelined(), pipelined(buckets=[(X,)])
    for pipeline, bucket, num in ((plain, 0, 0), (bucketed, 1, 1), (bucketed, -1, 1), (bucketed, -2, 1)):
        with pytest.raises(BapipeError) as caught:
            pipeline.step(X, target=Y, bucket=bucket)
        assert str(caught.value) == (
            f"`bucket` is {bucket}: this pipeline was made with {num} `buckets`, numbered from 0; None is for inputs of "
            "the planned size"
        )
    assert bucketed.step(X, target=Y, bucket=0) is not None


class MeanOverLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x / x.size(1))).sum(1) / x.size(1)


@pytest.mark.usefixtures("alone")
def test_a_size_that_a_stage_holds_as_a_number_must_be_that_of_all_buckets() -> None:
    """The last stage divides by a length that it cannot see: by 4, also where sentences have 2 words."""
    actions = [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]]
    options: dict[str, Any] = {
        "loss": mse_loss,
        "inputs": (torch.randn(4, 4, 3),),
        "buckets": [(torch.randn(4, 2, 3),)],
    }
    with pytest.raises(InvalidModel) as caught:
        Pipeline(MeanOverLength(), make_plan(["first", "last"], (1,), (0, 0), actions, 2, 2), **options)
    assert str(caught.value) == (
        "`buckets`: stage 1 computes 'truediv_1 = sum_1 / 4' for inputs of the planned sizes, but 'truediv_1 = sum_1 / 2' for "
        "those of bucket 0: a stage holds all sizes but the batch's as numbers. Let the layer that uses a size read it "
        "from its own input, or train without buckets"
    )
    options["buckets"] = [(torch.randn(2, 4, 3),)]
    Pipeline(MeanOverLength(), make_plan(["first", "last"], (1,), (0, 0), actions, 2, 2), **options)


class WithTeacher(nn.Module):
    """Whose forward assigns a frozen parameter: a mean over the micro-batches of training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.teacher = nn.Linear(3, 3), nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.teacher = nn.Parameter(0.5 * self.teacher + 0.5 * y.detach().mean(0), requires_grad=False)
        return y + self.teacher


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute", [(), (0,)])
def test_a_forward_may_assign_a_frozen_parameter(recompute: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(WithTeacher(), nn.Tanh())
    alone = copy.deepcopy(module)
    plan = make_plan(["0", "1"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2, recompute)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=(X,), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(2):
        alone.zero_grad()
        losses = [mse_loss(alone(x), y) / 2 for x, y in zip(X.split(2), Y.split(2), strict=True)]
        for loss in losses:
            loss.backward()
        assert pipeline.step(X, target=Y) == pytest.approx(sum(float(loss.detach()) for loss in losses))
        with torch.no_grad():
            for parameter in alone.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    assert pipeline.named_parameters().keys() == dict(alone.named_parameters()).keys()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(pipeline.state_dict()[name], value)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.repeats, self.layer = 1.0, 1, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


@pytest.mark.usefixtures("alone")
def test_an_attribute_that_a_loop_changes_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(Scaled(), Scaled())
    plan = make_plan(["0.layer", "1.layer"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=(X,))
    pipeline.step(X, target=Y)
    assert not caplog.messages
    module[1].scale = 0.5  # type: ignore[assignment]
    pipeline.step(X, target=Y)
    pipeline.step(X, target=Y)
    pipeline.step(X, target=Y)
    assert caplog.messages == [
        "the attribute '1.scale' was 1.0 when the model was traced and is 0.5 now: stages compute with the first value. If "
        "a forward reads it, make it a buffer, or make its module one layer (`leaf_modules`)"
    ]


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.layer = {"mode": "plain", "scale": 2.0}, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if self.config["mode"] == "plain" else -y


@pytest.mark.usefixtures("alone")
def test_a_setting_that_a_loop_changes_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(Configured(), nn.Tanh())
    plan = make_plan(["0.layer", "1"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=(X,))
    pipeline.step(X, target=Y)
    module[0].config = {"mode": "plain", "scale": 2.0}  # type: ignore[assignment]
    pipeline.step(X, target=Y)
    assert not caplog.messages
    module[0].config = None  # type: ignore[assignment]
    pipeline.step(X, target=Y)
    pipeline.step(X, target=Y)
    assert caplog.messages == [
        "the attribute '0.config' was an object of type dict when the model was traced and is None now: stages compute "
        "with the first value. If a forward reads it, make its module one layer (`leaf_modules`)"
    ]


@pytest.mark.usefixtures("alone")
def test_what_is_no_tensor_or_learning_rate_is_refused() -> None:
    pipeline = pipelined()
    with pytest.raises(BapipeError, match=r"^'target' is of type list: want a tensor$"):
        pipeline.step(X, target=Y.tolist())  # type: ignore[arg-type]
    for rate in (-0.1, float("nan"), float("inf")):
        with pytest.raises(BapipeError, match=f"^a learning rate of {rate}: want a finite one of at least 0$"):
            pipeline.set_learning_rate(rate)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda parameters: None, r"^`optimizer` returned None: want a function that returns an optimizer$"),
        (
            torch.optim.LBFGS,
            r"^optimizer 'LBFGS' runs the model several times per step, which a pipeline does not: want",
        ),
    ],
)
def test_what_is_made_must_be_an_optimizer_of_steps(optimizer: Any, message: str) -> None:
    with pytest.raises(BapipeError, match=message):
        pipelined(optimizer=optimizer)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step", [-5, "3", None, True])
def test_a_pipeline_starts_at_the_number_of_a_step(step: Any) -> None:
    with pytest.raises(BapipeError, match=r"^`step` is .*: want a whole number of at least 0$"):
        pipelined().start_at(step)


@pytest.mark.usefixtures("alone")
def test_the_weights_of_a_loss_go_to_the_device_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[object] = []
    monkeypatch.setattr("bapipe.runtime.rank_stages.move_tensors", lambda module, _: moved.append(module))
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2)
    Pipeline(nn.Sequential(nn.Linear(3, 3)), plan, loss=loss, inputs=(X,)).step(X, target=Y.sigmoid())
    assert moved == [loss]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("split", [False, True])
def test_hooks_that_are_added_between_steps_are_called_by_each_backward(split: bool) -> None:
    """I and W of torch call no hook on a parameter that runs after its gradient has been added."""
    backwards = [["0F0", "1F0", "1I0", "0I0", "1W0", "0W0"], ["0F0", "1F0", "1B0", "0B0"]]
    plan = make_plan(["0", "1", "2"], (2,), (0, 0), [backwards[not split]], 4, 1)
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=(X,))
    called: list[str] = []
    pipeline.step(X, target=Y)
    for name, parameter in pipeline.named_parameters().items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    pipeline.step(X, target=Y)
    assert sorted(called) == ["0.bias", "0.weight", "2.bias", "2.weight"]
