"""Which modules are loaded does not change the examples of a property."""

import sys

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import GLOBAL_CONSTANTS
from hypothesis.internal.constants_ast import constants_from_module

from bapipe.planner.stages import recomputation
from tests.strategies import examples


def test_constants_of_the_package_are_no_examples() -> None:
    seen: set[int] = set()

    @examples(1000)
    @given(st.integers(1000, 2**30))
    def draw(value: int) -> None:
        seen.add(value)

    draw()
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("bapipe.")]
    constants = {value for module in modules for value in constants_from_module(module).integers if value > 2000}
    assert recomputation.MAX_LABELS in constants
    assert len(seen) > 500
    # Hypothesis itself likes some numbers, also near the ends of the range.
    assert not seen & (constants - set(GLOBAL_CONSTANTS.integers))
