"""Fields of what Python code builds: of their types and within their limits, whatever type a number came in."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from bapipe.errors import BapipeError
from bapipe.field_types import check_fields
from bapipe.units import MAX_INT, NonNegative, Positive, Share


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    size: Positive = 1
    limit: NonNegative | None = None
    left_out: NonNegative | msgspec.UnsetType = msgspec.UNSET
    margin: Share = 0.0
    kind: Literal["a", "b"] | None = None
    pair: tuple[str, str] = ("x", "y")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataclass:
    size: Positive = 1
    names: Sequence[str] = ()
    inner: Struct | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize("size", [16e9, np.int64(16 * 10**9), np.float64(16e9), np.float32(16e9), Fraction(16 * 10**9)])
def test_whole_numbers_of_any_type_become_integers(size: Any) -> None:
    for value in (Struct(size=size), Dataclass(size=size)):
        assert value.size == 16 * 10**9
        assert type(value.size) is int


def test_other_values_are_kept() -> None:
    struct = Struct(margin=np.float64(0.25), limit=MAX_INT)
    assert (struct.margin, type(struct.margin), struct.limit, struct.left_out) == (0.25, float, MAX_INT, msgspec.UNSET)
    assert type(Struct(margin=0).margin) is float
    made = Dataclass(names=["l0", "l1"], inner=struct)
    assert made.names == ("l0", "l1")
    assert made.inner is struct
    assert hash(made) == hash(Dataclass(names=("l0", "l1"), inner=struct))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "`size` is 0: want at least 1"),
        ({"size": 1.5}, "`size` is 1.5: want int"),
        ({"size": True}, "`size` is True: want int"),
        ({"size": "8GB"}, "`size` is '8GB': want int"),
        ({"size": 1e22}, f"`size` is 1e+22: want at most {MAX_INT}"),
        ({"size": 10**400}, f"`size` is 1{17 * '0'}...{19 * '0'}: want at most {MAX_INT}"),
        ({"limit": float("nan")}, "`limit` is nan: want int or None"),
        ({"limit": float("inf")}, "`limit` is inf: want int or None"),
        ({"left_out": -1}, "`left_out` is -1: want at least 0"),
        ({"left_out": "x"}, "`left_out` is 'x': want int"),
        ({"margin": 1}, "`margin` is 1: want less than 1"),
        ({"margin": float("nan")}, "`margin` is nan: want at least 0"),
        ({"kind": "c"}, "`kind` is 'c': want 'a' or 'b' or None"),
        ({"pair": "xy"}, "`pair` is 'xy': want a list of 2 str"),
        ({"pair": ["x"]}, "`pair` is ['x']: want a list of 2 str"),
    ],
)
def test_values_of_another_type_or_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        Struct(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"names": "l0"}, "`names` is 'l0': want a list of str"),
        ({"names": ["l0", 1]}, "`names` is ['l0', 1]: want a list of str"),
        ({"inner": "x"}, "`inner` is 'x': want Struct or None"),
    ],
)
def test_fields_of_dataclasses_are_refused_alike(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        Dataclass(**given)
    assert str(caught.value) == message
