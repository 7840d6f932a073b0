"""A pipeline whose stages would not train as its module does is refused on every rank, and none of them waits."""

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bapipe.errors import InvalidModel
from bapipe.runtime import stage_check
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.replica_state import BufferAverage
from bapipe.runtime.split import split
from bapipe.torch_device import CPU, describe
from bapipe.tracing.layers import trace
from bapipe.tracing.stage_module import stage_module
from tests.multiprocess.runtime_cases import Residual, make_plan

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
ORDER = [["0F0", "1F0", "1B0", "0B0"]]


class Detaches(nn.Module):
    """Its stages lose the gradient of a, once the cut is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


check_equal = partial(stage_check.check_stages_equal, group=None, trains_on=CPU, trained=None, evaluated=None)
"""Of stages that train in the precision in which they were traced, and do not evaluate."""


def build(module: nn.Module, **options: Any) -> Pipeline:
    return Pipeline(module, make_plan(["a", "b"], (1,), (0, 0), ORDER, 2, 1), loss=cross_entropy, inputs=[X], **options)


def break_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None for _ in grads)

    monkeypatch.setattr("bapipe.tracing.stage_module._Seal.backward", staticmethod(lost))


@pytest.mark.usefixtures("alone")
def test_stages_that_lose_a_gradient_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    break_stages(monkeypatch)
    with pytest.raises(
        InvalidModel, match=r"^the stages would not train as the module does: the gradient of 'a\.bias' is missing"
    ):
        build(Detaches())
    assert build(Detaches(), check=False).stages
    with torch.device("meta"):
        module = Detaches()
    assert build(module).stages  # nothing to compare with


@pytest.mark.usefixtures("alone")
def test_a_module_that_does_not_repeat_itself_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_stages(monkeypatch)
    module, drawn = Detaches(), (number for number in range(1, 1000))
    module.a.register_forward_hook(lambda *given: given[2] * next(drawn))  # nobody can put a generator back
    build(module)
    assert "the variable 'drawn' around" in caplog.text
    assert "is an iterator that cannot be copied" in caplog.text
    assert [(record.levelname, record.message) for record in caplog.records if "compared" in record.message] == [
        (
            "WARNING",
            "the split model was not compared with the original: its loss on the same samples differs from run to run",
        )
    ]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("kind", "pass_s", "refused"), [("cuda", 9.0, False), ("cuda", 0.1, True), ("cpu", 9.0, True)])
def test_gpus_do_not_wait_long_for_the_cpu(
    kind: str, pass_s: float, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_stages(monkeypatch)
    monkeypatch.setattr(stage_check, "_pass_s", lambda *_: pass_s)
    plan, module = make_plan(["a", "b"], (1,), (0, 0), ORDER, 2, 1), Detaches()
    parts = split(trace(module, [X]), plan, [X])
    with pytest.raises(InvalidModel, match="would not train as the module does") if refused else nullcontext():
        check_equal(parts, [X], plan, trains_on=torch.device(kind))
    assert ("on this machine's CPU takes 9 s" in caplog.text) == (not refused)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compared", [True, False])
def test_what_takes_a_quarter_of_the_memory_is_not_compared_and_that_is_said(
    compared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_stages(monkeypatch)
    params = 4 * (6 * 6 + 6 + 6 * 5 + 5)
    kind = replace(describe(CPU), memory_bytes=4 * params + compared)
    monkeypatch.setattr(stage_check, "describe", lambda device: kind)
    with pytest.raises(InvalidModel, match="would not train as the module does") if compared else nullcontext():
        build(Detaches())
    said = "the stages are not compared with the model: its parameters take 0.0 GB of the 0.0 GB of memory where it"
    assert (said in caplog.text) == (not compared)


@pytest.mark.usefixtures("alone")
def test_a_module_on_a_gpu_is_compared_however_long_its_first_pass_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which libraries are loaded, and nothing waits for the GPU."""
    monkeypatch.setattr(stage_check, "device_of", lambda module: torch.device("cuda"))
    monkeypatch.setattr(stage_check, "describe", lambda device: describe(CPU))
    monkeypatch.setattr(stage_check, "_pass_s", lambda *_: 9.0)
    monkeypatch.setattr(stage_check, "_training_fault", lambda *_: "compared")
    plan, module = make_plan(["a", "b"], (1,), (0, 0), ORDER, 2, 1), Detaches()
    with pytest.raises(InvalidModel, match=r"^compared$"):
        check_equal(split(trace(module, [X]), plan, [X]), [X], plan, trains_on=torch.device("cuda"))


@pytest.mark.usefixtures("alone")
def test_a_pass_on_a_cpu_is_timed() -> None:
    plan, module = make_plan(["a", "b"], (1,), (0, 0), ORDER, 2, 1), Detaches()
    parts = split(trace(module, [X]), plan, [X])
    assert 0 < stage_check._pass_s(parts, plan, [X]) < 60
    assert all(parameter.grad is None for parameter in module.parameters())
    assert stage_check._pass_s(parts, plan, [X[:, :3]]) == 0.0  # which fails


@pytest.mark.usefixtures("alone")
def test_a_module_is_afterwards_as_it_was() -> None:
    module = Residual()
    x = torch.randn(2, 3, 6, 6)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = trace(module, [x])
    plan = make_plan([layer.name for layer in model.layers], (3,), (0, 0), ORDER, 2, 1)
    check_equal(split(model, plan, [x]), [x], plan)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


class Changing(nn.Module):
    """A teacher that follows weights, a codebook that follows activations, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.teacher = nn.Linear(6, 5).requires_grad_(False)
        self.register_buffer("codes", torch.zeros(6))
        self.codes: Tensor
        self.changes = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.norm(self.a(x)))
        with torch.no_grad():
            if self.changes == "teacher.weight":
                self.teacher.weight.mul_(0.9).add_(self.b.weight[:5], alpha=0.1)
            if self.changes == "codes":
                self.codes.mul_(0.9).add_(x.mean(0), alpha=0.1)
            wanted = self.teacher(x) + self.codes[:5]
        return x[:, :5] * wanted


REPLICATED = [["0F0", "0B0"], ["1F0", "1B0"], []]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", ["", "teacher.weight", "codes"])
def test_replicas_of_a_stage_that_changes_other_state_than_running_statistics_are_refused(changes: str) -> None:
    module = Changing()
    module.changes = changes
    model = trace(module, [X])
    layers = [layer.name for layer in model.layers]
    plan = make_plan(layers, (1,), (0, (1, 2)), REPLICATED, 2, 1)
    parts = split(model, plan, [X])
    replicas = BufferAverage(1, stage_module(parts, 1), dist.group.WORLD, 1.0)  # type: ignore[arg-type]
    replicas.begin()
    stage_module(parts, 1)(stage_module(parts, 0)(X)[0])
    if not changes:
        replicas.finish()
        check_equal(parts, [X], plan)
        return
    said = rf"^'{changes}' in stage 1 changes in forwards, and the stage has replicas.*\(`replicas`\)$"
    with pytest.raises(InvalidModel, match=said):
        check_equal(parts, [X], plan)
    with pytest.raises(InvalidModel, match=said):  # if nothing was compared before training
        replicas.finish()


class Counts(nn.Module):
    """A layer that counts its forwards in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.weight = 0, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight / self.calls


@pytest.mark.usefixtures("alone")
def test_replicas_of_a_layer_that_keeps_values_in_python_are_refused() -> None:
    module = nn.Sequential(nn.Linear(6, 6), Counts(), nn.Linear(6, 5))
    model = trace(module, [X])
    for ranks, order, words in (
        ((0, (1, 2)), REPLICATED, r"keeps values from forward to forward, and the stage has replicas.*\(`replicas`\)$"),
        ((0, 0), [["0F1", "0F0", "1F1", "1F0", "1B0", "1B1", "0B0", "0B1"]], r"keeps values .* in the order \[1, 0\]"),
        ((0, 0), [["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]], ""),
    ):
        plan = make_plan([layer.name for layer in model.layers], (1,), ranks, order, 2, 2 if ranks == (0, 0) else 1)
        parts = split(model, plan, [X])
        if not words:
            check_equal(parts, [X], plan)
            continue
        with pytest.raises(InvalidModel, match=rf"^layer '1' in stage 1 {words}"):
            check_equal(parts, [X], plan)


class LimitedAndTied(nn.Module):
    """An embedding whose forward changes its rows, which are the weights of the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(5, 6, max_norm=1e9), nn.Linear(6, 6), nn.Linear(6, 5)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.a(x + self.embed((x[:, 0] > 0).long())))
        return y


@pytest.mark.usefixtures("alone")
def test_a_parameter_of_two_stages_that_a_forward_changes_is_refused() -> None:
    model = trace(LimitedAndTied(), [X])
    plan = make_plan([layer.name for layer in model.layers], (1,), (0, 0), ORDER, 2, 1)
    with pytest.raises(
        InvalidModel, match=r"^'embed.weight' is used in stages 0, 1, and a forward of one .* changes it"
    ):
        check_equal(split(model, plan, [X]), [X], plan)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", ["", "codes"])
def test_forwards_that_read_what_others_leave_run_in_the_order_of_the_whole_model(changes: str) -> None:
    module = Changing()
    module.changes = changes
    model = trace(module, [X])
    for forwards in (["0F0", "0F1"], ["0F1", "0F0"]):
        order = [*forwards, "1F0", "1B0", "1F1", "1B1", "0B0", "0B1"]
        plan = make_plan([layer.name for layer in model.layers], (4,), (0, 0), [order], 4, 2)
        parts = split(model, plan, [X])
        if changes and forwards[0] == "0F1":
            with pytest.raises(InvalidModel, match=rf"^'{changes}' in stage 0 .* in the order \[1, 0\]"):
                check_equal(parts, [X], plan)
        else:
            check_equal(parts, [X], plan)


def test_the_other_ranks_hear_of_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, as threads of this process: the second compares nothing."""
    break_stages(monkeypatch)
    said: list[str | None] = [None]
    ready = threading.Event()
    rank = threading.local()

    def broadcast(values: list[str | None], **_: Any) -> None:
        if rank.index == 0:
            said[:] = values
            ready.set()
        else:
            assert ready.wait(60)
            values[:] = said

    monkeypatch.setattr(dist, "get_rank", lambda group: rank.index)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    model = trace(Detaches(), [X])
    plan = make_plan(["a", "b"], (1,), (0, 0), ORDER, 2, 1)
    parts = split(model, plan, [X])
    errors = {}

    def check(index: int) -> None:
        rank.index = index
        with pytest.raises(InvalidModel) as error:
            check_equal(parts, [X], plan)
        errors[index] = str(error.value)

    threads = [threading.Thread(target=check, args=(index,)) for index in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors[0] == errors[1]


class Table(nn.Module):
    """Scales by a buffer, which its forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.scale: Tensor
        self.changes = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.changes == "values":
            self.scale.mul_(0.5)
        if self.changes == "tensor":
            self.scale = self.scale * 0.5
        return x * self.scale.clone() if x.detach().sum().item() < 1e9 else x


class OneTable(nn.Module):
    """Two layers that share a table."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.table = nn.Linear(6, 6), nn.Linear(6, 5), Table()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.table(self.a(self.table(x))))
        return y


def with_one_table(changes: str, **options: Any) -> tuple[OneTable, Pipeline]:
    module = OneTable()
    module.table.changes = changes
    plan = make_plan(["table", "a", "table#2", "b"], (1,), (0, 0), ORDER, 2, 1)
    return module, Pipeline(module, plan, loss=cross_entropy, inputs=[X], **options)


SHARED = (
    r"^buffer 'table\.scale' is used in stages 0, 1, and training changes it, which the others do not see: layers that "
    "share such a buffer must share a stage, or have modules of their own$"
)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", ["values", "tensor"])
def test_stages_may_share_a_buffer_until_a_forward_changes_it(changes: str) -> None:
    target = torch.tensor([0, 3])
    module, pipeline = with_one_table("")
    loss = cross_entropy(module(X), target)
    assert pipeline.step(X, target=target) == loss.item()
    assert pipeline.step(X, target=target) is not None
    module.table.changes = changes
    with pytest.raises(InvalidModel, match=SHARED):
        pipeline.step(X, target=target)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", ["values", "tensor"])
def test_stages_that_share_a_buffer_that_changes_are_refused(changes: str) -> None:
    with pytest.raises(InvalidModel, match=SHARED):
        with_one_table(changes)
    _, unchecked = with_one_table(changes, check=False)
    with pytest.raises(InvalidModel, match=SHARED):
        unchecked.step(X, target=torch.tensor([0, 3]))
