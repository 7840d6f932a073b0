"""The order of a pipeline's calls: which tags their transfers have, and where two processes have called different things."""

from itertools import product

import pytest

from bapipe.runtime.call_order import NUM_TAGS, CallOrder, first_difference

THINGS = ("`step`", "`step` with bucket 0", "`evaluate` of 4 samples", "`evaluate` of 2 samples")


def after(*calls: str) -> CallOrder:
    order = CallOrder()
    for what in calls:
        order.begin(what)
    return order


def test_a_tag_is_that_of_the_same_call_in_other_processes_and_of_no_other_call() -> None:
    tags = [after(*["`step`"] * number, what).tag for number, what in product(range(50), THINGS)]
    assert len({*tags}) == len(tags)
    assert all(0 <= tag < NUM_TAGS for tag in tags)
    assert after("`step`", "`step`").tag == after("`evaluate` of 4 samples", "`step`").tag  # told by the first call


def test_a_call_has_not_exchanged_tensors_when_it_begins() -> None:
    order = after("`step`")
    order.is_under_way = True
    assert order.begin("`step`").number == 2
    assert not order.is_under_way


@pytest.mark.parametrize("ahead", [0, 1, 6])
def test_the_first_difference_is_found_in_what_both_have_called(ahead: int) -> None:
    for some, others in product(product("se", repeat=4), repeat=2):
        known = after(*some).latest
        of_other = after(*others, *"s" * ahead).latest
        first = of_other[0].number - 1  # of another process no more than the latest calls are known
        expected = next((pair for pair in list(zip(some, others, strict=True))[first:] if pair[0] != pair[1]), None)
        assert first_difference(known, of_other) == expected
    assert len(after(*"s" * 100).latest) == 8
