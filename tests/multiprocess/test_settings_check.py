"""A pipeline that would compute otherwise than its plan's profile was measured is refused before it is built."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn

from bapipe.equivalence.outcome import Loss
from bapipe.errors import BapipeError
from bapipe.formats.settings import Settings
from bapipe.runtime.optimizer import OptimizerFactory, optimizer_factory, sgd
from bapipe.runtime.pipeline import Pipeline
from tests.multiprocess.runtime_cases import make_plan

THREADS = torch.get_num_threads()


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    before = torch.get_num_threads()  # another file of this process may have changed it since THREADS was read
    torch.set_num_threads(THREADS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(before)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def build(
    measured: Settings,
    module: nn.Module,
    inputs: Tensor,
    autocast: torch.dtype | None = None,
    make: OptimizerFactory | None = None,
    loss: Loss = nn.functional.cross_entropy,
) -> Pipeline:
    names = [name for name, _ in module.named_children()]
    plan = structs.replace(make_plan(names, (), (0,), [["0F0", "0B0"]], 2, 1), settings=measured)
    return Pipeline(module, plan, loss=loss, inputs=[inputs], autocast=autocast, optimizer=make)


@pytest.mark.parametrize(
    ("measured", "make", "autocast", "optimizer_here", "words"),
    [
        ({"dtype": "float64"}, images, None, None, ("dtype float64", "dtype float32")),
        ({"autocast": "bfloat16"}, images, None, None, ("autocast bfloat16", "no autocast")),
        ({}, images, torch.bfloat16, None, ("no autocast", "autocast bfloat16")),
        ({"channels_last": True}, images, None, None, ("channels last true", "channels last false")),
        (
            {},
            lambda: images().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            None,
            None,
            ("channels last false", "channels last true"),
        ),
        ({"optimizer": "adam"}, images, None, None, ("optimizer adam", "optimizer sgd-momentum")),
        ({}, images, None, sgd(momentum=0.0), ("optimizer sgd-momentum", "optimizer sgd")),
        ({}, images, None, optimizer_factory("AdamW", 0.1, {}), ("optimizer sgd-momentum", "optimizer adamw")),
    ],
)
def test_the_differing_setting_is_named(measured, make, autocast, optimizer_here, words) -> None:  # type: ignore[no-untyped-def]
    settings = structs.replace(Settings(threads=THREADS), **measured)
    with pytest.raises(BapipeError) as error:
        build(settings, make(), torch.randn(1, 3, 6, 6), autocast, optimizer_here)
    remedy = "let `optimizer` make the plan's, or " if words[0].startswith("optimizer") else ""
    assert str(error.value) == (
        f"the plan is for a model that was measured with {words[0]}; this run computes with {words[1]}: {remedy}profile "
        "with the settings of the run, and plan again"
    )


def test_threads_may_be_set_by_the_process() -> None:
    with pytest.raises(BapipeError) as error:
        build(Settings(threads=THREADS + 1), images(), torch.randn(1, 3, 6, 6))
    assert str(error.value) == (
        f"the plan is for a model that was measured with threads {THREADS + 1}; this run computes with threads {THREADS}: "
        f"call torch.set_num_threads({THREADS + 1}) before it is built, or profile with the settings of the run, and plan "
        "again"
    )


@pytest.mark.parametrize(
    ("measured", "make"),
    [
        ({}, None),
        ({"tf32": True}, None),  # says nothing of a CPU
        ({"optimizer": "adam"}, optimizer_factory("Adam", 0.1, {})),
        ({}, optimizer_factory("RMSprop", 0.1, {})),  # profiles do not know it
    ],
)
def test_equal_settings_run(measured: dict[str, object], make: OptimizerFactory | None) -> None:
    pipeline = build(
        structs.replace(Settings(threads=THREADS), **measured), images(), torch.randn(1, 3, 6, 6), None, make
    )
    pipeline.step(torch.randn(2, 3, 6, 6), target=torch.tensor([0, 1]))


def test_an_unobservable_memory_layout_is_not_compared() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    build(Settings(threads=THREADS, channels_last=True), module, torch.randn(1, 3, 6, 6))


@pytest.mark.parametrize(("tf32", "expected"), [(True, ["tf32"] * 3), (False, ["ieee", "none", "none"])])
def test_steps_compute_with_the_plan_s_tf32_and_restore_the_process_s(tf32: bool, expected: list[str]) -> None:
    backends: Any = torch.backends
    parts = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    found: list[str] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found.extend(part.fp32_precision for part in parts)
        return nn.functional.cross_entropy(output, target)

    before = [part.fp32_precision for part in parts]
    pipeline = build(Settings(threads=THREADS, tf32=tf32), images(), torch.randn(1, 3, 6, 6), loss=loss)
    found.clear()
    pipeline.step(torch.randn(2, 3, 6, 6), target=torch.tensor([0, 1]))
    assert found == expected
    assert [part.fp32_precision for part in parts] == before


def test_images_are_channels_last_if_the_plan_is() -> None:
    found: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found.append(output.is_contiguous(memory_format=torch.channels_last) and not output.is_contiguous())
        return nn.functional.mse_loss(output, target)

    module = nn.Sequential(nn.MaxPool2d(2))  # keeps the format of its input
    module.append(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    pipeline = build(Settings(threads=THREADS, channels_last=True), module, torch.randn(1, 3, 6, 6), loss=loss)
    found.clear()
    pipeline.step(torch.randn(2, 3, 6, 6), target=torch.randn(2, 4, 2, 2))
    assert found == [True]


@pytest.mark.parametrize(("autocast", "name"), [("bfloat16", "'bfloat16'"), (torch.float32, r"torch\.float32")])
def test_types_that_autocast_does_not_take_are_refused(autocast: Any, name: str) -> None:
    with pytest.raises(BapipeError, match=rf"^`autocast` is {name}: want torch\.bfloat16, torch\.float16 or None$"):
        build(Settings(threads=THREADS, autocast="bfloat16"), images(), torch.randn(1, 3, 6, 6), autocast)
