"""Code may advance iterators that it reaches, which afterwards give what they would have given."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.module_state.code_state import iterators_not_put_back
from bapipe.module_state.iterators import can_be_copied, copied_iterator
from bapipe.module_state.python_state import state_restored
from bapipe.module_state.reached_state import KeptState

COUNTER = itertools.count()


def generator() -> Iterator[int]:
    yield from range(100)


@pytest.mark.parametrize(
    "make",
    [
        partial(itertools.count, 3, 2),
        lambda: itertools.cycle([1, 2, 3]),
        lambda: iter([5, 6, 7, 8, 9]),
        lambda: iter(range(9)),
        lambda: iter({"a": 1, "b": 2, "c": 3}),
        lambda: reversed([1, 2, 3, 4]),
        lambda: zip([1, 2, 3], itertools.count(), strict=False),
        lambda: itertools.chain([1], [2, 3], [4]),
        lambda: map(abs, iter([-1, 2, -3])),
    ],
)
@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_a_copy_gives_what_the_iterator_will(make: Callable[[], Iterator[Any]], num_taken: int) -> None:
    one, other = make(), make()
    for each in (one, other):
        list(itertools.islice(each, num_taken))
    copy = copied_iterator(one)
    expected = list(itertools.islice(other, 5))
    assert list(itertools.islice(copy, 5)) == expected
    assert list(itertools.islice(one, 5)) == expected


def test_what_takes_values_from_a_generator_cannot_be_copied() -> None:
    assert not any(map(can_be_copied, (generator(), zip(generator(), [1], strict=False), map(abs, generator()))))


class Takes(nn.Module):
    """Takes a value from each iterator that it reaches."""

    def __init__(self, own: Iterator[int], around: Iterator[int]) -> None:
        super().__init__()
        self.layer, self.own, self.held = nn.Linear(2, 2), own, {"each": [itertools.count()]}
        self.layer.register_forward_hook(lambda *_: self.note(next(around)))
        self.seen: list[int] = []

    def note(self, number: int) -> None:
        self.seen.append(number)

    def forward(self, x: Tensor, default: Iterator[int] = itertools.count()) -> Tensor:  # noqa: B008
        self.seen += [next(self.own), next(COUNTER), next(self.held["each"][0]), next(default)]
        y: Tensor = self.layer(x)
        return y


def test_iterators_that_forwards_advance_are_put_back() -> None:
    around = itertools.count()
    module = Takes(itertools.count(), around)
    with state_restored(module):
        for number in range(3):
            module(torch.rand(1, 2))
            assert module.seen[-5:] == [number] * 5
    assert next(around) == 0
    module(torch.rand(1, 2))
    assert module.seen == [0, 0, 0, 0, 1]
    assert next(COUNTER) == 1


def test_an_iterator_that_two_hold_is_one_meanwhile() -> None:
    shared, given = itertools.count(), list[int]()
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in module:
        layer.register_forward_hook(lambda *_: given.append(next(shared)))
    seen = []
    with state_restored(module):
        module(torch.rand(1, 2))
        seen += given
    assert seen == [0, 1]
    assert next(shared) == 0


def test_iterators_of_a_loss_are_put_back() -> None:
    numbers = iter([1.0, 2.0, 3.0])

    def loss() -> float:
        return next(numbers)

    with KeptState(loss).restored():
        assert [loss(), loss()] == [1.0, 2.0]
    assert next(numbers) == 1.0


@pytest.mark.parametrize("is_own", [True, False])
def test_generators_are_told_of(is_own: bool) -> None:
    counts, generated = itertools.count(), generator()
    words = iterators_not_put_back(Takes(generated, counts) if is_own else Takes(counts, generated))
    assert words is not None
    assert words.startswith("the attribute 'own' is" if is_own else "the variable 'around' around ")
    assert iterators_not_put_back(Takes(itertools.count(), itertools.count())) is None
