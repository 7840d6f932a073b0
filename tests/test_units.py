"""Exact rounding: shares that are bounds are rounded up."""

from fractions import Fraction
from random import Random

import pytest

from bapipe.formats.certificate import certify
from bapipe.printable import counted
from bapipe.units import decimal, percent_change, percent_up


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (0.0, 2, "0.00%"),
        (1e-12, 2, "0.01%"),
        (0.004451, 2, "0.45%"),
        (0.004451, 1, "0.5%"),
        (0.0045001, 2, "0.46%"),
        (0.032, 2, "3.20%"),
        (0.3401, 1, "34.1%"),
        (12.0, 2, "1,200.00%"),
    ],
)
def test_a_share_that_is_a_bound_is_rounded_up(share: float, digits: int, text: str) -> None:
    assert percent_up(share, digits) == text


def test_floats_are_read_as_the_decimals_that_are_written() -> None:
    assert [decimal(value) for value in (0.15, 2.0, 1e-7)] == [Fraction(15, 100), 2, Fraction(1, 10**7)]


def test_no_printed_gap_is_below_the_true_one_nor_far_above() -> None:
    random = Random(3)
    for _ in range(2000):
        bound_ns = random.randint(1, 10 ** random.randint(1, 12))
        step_ns = bound_ns + random.randint(0, bound_ns)
        true = Fraction(step_ns - bound_ns, bound_ns)
        printed = Fraction(percent_up(certify(step_ns, bound_ns, "").gap).rstrip("%")) / 100
        assert true <= printed < true + Fraction(1, 10_000)


def test_whole_steps_of_the_last_digit_stay_as_they_are() -> None:
    for share in range(1, 5000):
        assert percent_up(certify(10_000 + share, 10_000, "").gap) == f"{share / 100:.2f}%"


@pytest.mark.parametrize(
    ("share", "text"), [(-0.0004, "+0.0%"), (0.0, "+0.0%"), (0.0004, "+0.0%"), (-0.0006, "-0.1%"), (1.5, "+150.0%")]
)
def test_a_change_that_rounds_to_nothing_is_not_negative(share: float, text: str) -> None:
    assert percent_change(share) == text


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [(1, "layer", "1 layer"), (0, "layer", "0 layers"), (2000, "more device", "2,000 more devices")]
    + [(number, what, f"{number} {what}{'es' * (number > 1)}") for number in (1, 2) for what in ("process", "batch")],
)
def test_one_thing_is_no_plural(number: int, what: str, text: str) -> None:
    assert counted(number, what) == text
