"""Mini-batches that processes are given are compared."""

import pytest
import torch
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.runtime.batch_check import GivenInput, by_name, check_same_batch
from tests.runtime.gathering import call_as_processes


def checked(monkeypatch: pytest.MonkeyPatch, *given: dict[str, Tensor]) -> None:
    call_as_processes(monkeypatch, lambda one: check_same_batch(one, None), *given)


def test_what_all_that_give_it_have_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, target = torch.randn(4, 2, dtype=torch.bfloat16), torch.arange(1, 5)
    checked(monkeypatch, {"input": x}, {"input": x.clone(), "the target": target}, {"the target": target})


def test_zeros_may_stand_for_what_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 2)
    checked(monkeypatch, {"input": x}, {"input": torch.zeros_like(x), "the target": torch.zeros(0)})


@pytest.mark.parametrize("row", [0, 3])
def test_other_samples_are_refused(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    target = torch.arange(1, 5)
    other = target.clone()
    other[row] = 7
    with pytest.raises(BapipeError, match=r"^process 2 was given other samples of 'the target' than process 1: all"):
        checked(monkeypatch, {}, {"the target": target}, {"the target": other})


def test_inputs_are_given_in_order_or_by_name() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    names = ("ids", "mask")
    assert by_name([x, mask], names) == by_name([{"mask": mask, "ids": x}], names) == {"ids": x, "mask": mask}
    assert by_name([x], names) == by_name([{"ids": x}], names) == {"ids": x}
    assert by_name([None, mask], names) == {"ids": None, "mask": mask}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([{"ids": torch.zeros(2), "types": torch.zeros(2)}], "'types' is not a tensor input of the model: want"),
        ([torch.zeros(2)] * 3, "3 inputs for a model that takes 2: want ids, mask; constants are set"),
    ],
)
def test_other_inputs_are_refused(inputs: list[GivenInput], words: str) -> None:
    with pytest.raises(BapipeError, match=f"^{words}"):
        by_name(inputs, ("ids", "mask"))
