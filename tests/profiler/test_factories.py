"""Profiles of models that a function makes, which is given itself."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import bapipe
from bapipe.errors import BapipeError
from bapipe.formats.settings import Settings
from bapipe.profiler import profile as profiles
from bapipe.zoo import factory as factories


def tiny(width: int = 3) -> bapipe.Example:
    x = torch.zeros(2, width)
    return bapipe.Example(module=nn.Sequential(nn.Linear(width, width)), inputs=[x], target=x, loss=mse_loss)


def profiled(factory: Any, **options: Any) -> bapipe.ModelProfile:
    return bapipe.profile(factory, microbatch_sizes=(1,), settings=Settings(threads=1), **options)


def test_a_function_of_a_module_is_named_in_the_profile() -> None:
    made = profiled(tiny, arguments={"width": 5})
    assert (made.model, made.factory, dict(made.arguments)) == ("tiny", f"{__name__}:tiny", {"width": 5})
    assert made.layers[0].param_bytes == 4 * 30
    assert profiled(f"{__name__}:tiny", name="other").model == "other"


def test_a_function_that_no_other_process_can_import_is_not_named() -> None:
    def local() -> bapipe.Example:
        return tiny()

    assert profiled(local).factory is None
    assert profiled(partial(tiny, width=4)).factory is None


def test_what_belongs_to_a_module_and_to_a_factory_is_told_apart() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(BapipeError, match=r"^a module is profiled with example `inputs`"):
        bapipe.profile(nn.Linear(3, 3))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target)

    with pytest.raises(BapipeError, match=r"^`arguments` and `num_co_runners` are for a factory"):
        bapipe.profile(nn.Linear(3, 3), [x], x, loss, arguments={"width": 3})  # type: ignore[call-overload]


def test_a_factory_gives_its_own_inputs() -> None:
    with pytest.raises(
        BapipeError, match=r"^a factory gives its own `inputs`, `target` and `loss`: leave them out, or"
    ):
        bapipe.profile(tiny, (torch.zeros(2, 3),))  # type: ignore[call-overload]


def test_a_device_may_be_one_of_torch() -> None:
    assert profiled(tiny, device=torch.device("cpu")).device.kind == "cpu"


@pytest.mark.parametrize("sizes", [4, []])
def test_micro_batch_sizes_are_several(sizes: Any) -> None:
    with pytest.raises(BapipeError, match=r"^`microbatch_sizes` is 4: want a list of sizes, such as \[4\]$|^no micro-"):
        bapipe.profile(tiny, microbatch_sizes=sizes)


def test_a_cached_profile_depends_on_the_version_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(factory: str, version: str) -> dict[str, object]:
        monkeypatch.setattr(factories, "version", lambda package: version)
        return profiles._cache_key(factory, {}, "cpu", Settings())

    model = "bapipe.zoo.hugging_face:GPT2LMHeadModel"
    assert key(model, "5.1") != key(model, "5.2")
    assert key("bapipe.zoo.gpt2:gpt2", "5.1") == key("bapipe.zoo.gpt2:gpt2", "5.2")
