"""Processes with another model than the first one are told before they train."""

import importlib.util
import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.errors import BapipeError
from bapipe.runtime import same_model
from bapipe.runtime.same_model import check_same_model
from bapipe.tracing.layers import trace
from bapipe.tracing.model import TracedModel
from tests.runtime.gathering import call_as_processes

SOURCE = """
import torch
from functools import partial
from torch import nn

RATE, SHARE = 2.0, 0.1

def squeeze(x):
    return torch.tanh(x) * 0.5

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rate = nn.Linear(4, 4), RATE

    def forward(self, x):  # one layer, of which nobody looks inside
        return self.linear(x) * self.rate if x.sum() > 0 else self.linear(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.own, self.drop = nn.Linear(4, 4), Own(), nn.Dropout(SHARE)

    def forward(self, x):
        return self.drop(self.own(squeeze(self.first(x))))

class OwnLoss(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, output, target):
        return (output - target).square().mean() * self.weight

def softened(x):
    return x * 0.9

def plain(output, target):
    return (softened(output) - target).square().mean()

def made_with(weight):
    def loss(output, target):
        return plain(output, target) * weight if weight else later
    if weight is None:
        later = 1.0
    return loss

class Trainer:
    def __init__(self):
        self.rank = RANK

    def loss(self, output, target):
        return plain(output, target)

RANK = 0
WEIGHT = 2.0
WORDS = "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w" + "w"  # too deep to be compared, not to be imported

def log(text):
    print(text)

log = log if RANK == 0 else None

def noting(output, target):
    if log:
        log("loss")
    return sum(plain(output, target) * weight for weight in [WEIGHT])

losses = [
    nn.CrossEntropyLoss(label_smoothing=0.1), OwnLoss(0.5), plain, made_with(0.25), partial(plain),
    lambda output, target: (output - target).abs().mean(), Trainer().loss, torch.no_grad()(plain), noting,
]
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compares models whose sources are as they are; a process builds its own from a file of its own."""
    numbers = count()

    def check(*sources: str, loss: int = 0) -> None:
        built = list[tuple[TracedModel, Any]]()
        for source in sources:
            path = tmp_path / f"host{next(numbers)}.py"
            path.write_text(source)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            mine = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, path.stem, mine)
            spec.loader.exec_module(mine)
            torch.manual_seed(len(built))
            model = trace(mine.Model(), [torch.ones(2, 4)], leaf_modules=["own"])
            built.append((model, mine.losses[loss]))
        call_as_processes(monkeypatch, lambda one: check_same_model(one[0], one[1], None), *built)

    return check


@pytest.mark.parametrize("loss", range(9))
def test_the_same_source_with_other_values_and_comments_is_fine(
    check: Any, loss: int, caplog: pytest.LogCaptureFixture
) -> None:
    commented = SOURCE.replace("  # one layer", "\n        # here")
    annotated = SOURCE.replace("(output, target):", "(output, target: int) -> float:")
    documented = SOURCE.replace("def squeeze(x):\n", 'def squeeze(x):\n    "Halves."\n')
    check(SOURCE, commented, annotated, documented, SOURCE.replace("RANK = 0", "RANK = 1"), loss=loss)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("old", "new", "loss", "part"),
    [
        ("torch.tanh(x)", "torch.sigmoid(x)", 0, "the layer 'first'"),  # in a function that the forward calls
        ("x) * 0.5", "x) * 0.6", 0, "the layer 'first'"),
        ("2.0, 0.1", "2.0, 0.6", 0, "the module 'drop'"),
        ("nn.Dropout(SHARE)", "nn.Tanh()", 0, "the module 'drop'"),
        ("x.sum() > 0", "x.sum() > 1", 0, "the module 'own'"),
        (".square().mean() *", ".abs().mean() *", 1, "the loss"),
        ("x * 0.9", "x * 0.8", 2, "'softened', which the model or its loss uses"),  # in a function that the loss calls
        ("x * 0.9", "x * 0.8", 3, "'softened', which the model or its loss uses"),
        ("x * 0.9", "x * 0.8", 4, "'softened', which the model or its loss uses"),
        (".abs().mean(), Tr", ".square().mean(), Tr", 5, "the loss"),
        ("[\n    nn.CrossEntropyLoss(label_smoothing=0.1)", "[\n    nn.MSELoss()", 0, "the loss"),
        ("x * 0.9", "x * 0.8", 6, "'softened', which the model or its loss uses"),
        ("x * 0.9", "x * 0.8", 7, "'softened', which the model or its loss uses"),
    ],
)
def test_another_version_is_refused_by_its_first_part(check: Any, old: str, new: str, loss: int, part: str) -> None:
    assert SOURCE.count(old) == 1
    with pytest.raises(BapipeError, match=re.escape(f"process 1 has another version of {part} than process 0")):
        check(SOURCE, SOURCE.replace(old, new), loss=loss)


@pytest.mark.parametrize(
    ("old", "new", "loss", "part"),
    [
        ("2.0, 0.1", "3.0, 0.1", 2, "attributes of the module 'own'"),
        ("smoothing=0.1", "smoothing=0.3", 0, "attributes of the loss"),
        ("OwnLoss(0.5)", "OwnLoss(0.6)", 1, "attributes of the loss"),
        ("made_with(0.25)", "made_with(0.5)", 3, "variables that the loss names"),
        ("partial(plain)", "partial(plain, target=1)", 4, "arguments of the loss"),
        ("WEIGHT = 2.0", "WEIGHT = 3.0", 8, "variables that the loss names"),
    ],
)
def test_other_settings_of_ones_own_are_told(
    check: Any, old: str, new: str, loss: int, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be of a process, such as its rank."""
    assert SOURCE.count(old) == 1
    check(SOURCE, SOURCE.replace(old, new), loss=loss)
    (message,) = caplog.messages
    assert message.startswith(f"process 1 has other numbers or strings in {part} than process 0: unless these belong")


@pytest.mark.parametrize("kind", ["staticmethod", "classmethod", "property"])
def test_code_that_methods_of_each_kind_use_is_compared(check: Any, kind: str) -> None:
    forward = "    def forward(self, x):  # one layer"
    source = SOURCE.replace(forward, f"    @{kind}\n    def soft(x):\n        return softened(x)\n\n{forward}")
    with pytest.raises(BapipeError, match="process 1 has another version of 'softened', which the model"):
        check(source, source.replace("x * 0.9", "x * 0.8"))


def test_other_settings_of_a_parametrized_module_are_told(check: Any, caplog: pytest.LogCaptureFixture) -> None:
    own, register = "nn.Linear(4, 4), RATE", "nn.utils.parametrize.register_parametrization(self, 'scale', nn.ReLU())"
    source = SOURCE.replace(own, f"{own}; self.scale = nn.Parameter(torch.ones(4)); {register}")
    check(source, source.replace("2.0, 0.1", "3.0, 0.1"), loss=2)
    (message,) = caplog.messages
    assert message.startswith("process 1 has other numbers or strings in attributes of the module 'own' than process 0")


def test_under_another_python_code_is_not_compared(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its syntax trees are others; what layers compute is compared all the same."""
    versions = iter([("3", "11", "7"), ("3", "12", "1")] * 2)
    monkeypatch.setattr(same_model, "python_version_tuple", lambda: next(versions))
    check(SOURCE, SOURCE.replace("x.sum() > 0", "x.sum() > 1"))
    with pytest.raises(BapipeError, match="another version of the layer 'first'"):
        check(SOURCE, SOURCE.replace("torch.tanh(x)", "torch.sigmoid(x)"))


class Counting(nn.Module):
    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.num_calls = num_calls

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x


def test_what_a_module_has_counted_in_an_earlier_pipeline_is_not_compared() -> None:
    """Only the process with its stage has called it: the next Pipeline of the model would warn."""

    def settings(model: nn.Module) -> list[tuple[str, str]]:
        return [*same_model._settings(model, functional.mse_loss)]

    model, other = nn.Sequential(Counting(5)), nn.Sequential(Counting(6))
    first = settings(model)
    assert settings(other) != first == settings(nn.Sequential(Counting(5)))
    model[0](torch.zeros(1))
    assert model[0].num_calls == 6
    assert settings(model) == first
