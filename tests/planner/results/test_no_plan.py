"""Errors of parts of a space."""

from itertools import permutations

from bapipe.errors import BapipeError, ConstraintsUnmet, Infeasible
from bapipe.planner.compute.deadline import OutOfTime
from bapipe.planner.results.no_plan import bounds_without_plan, error_of_all, what_to_try
from tests.builders import chain

PROVEN, UNPROVEN = Infeasible("nothing fits"), Infeasible("nothing was found", is_proven=False)
LATE, UNMET = OutOfTime("too late", 7), ConstraintsUnmet("no such plan")


def test_only_proofs_leave_no_plan() -> None:
    found = {error: bounds_without_plan(error) for error in (PROVEN, UNPROVEN, LATE, UNMET)}
    assert found == {PROVEN: (), UNPROVEN: (0,), LATE: (7,), UNMET: ()}


def test_what_proves_nothing_is_said_before_proofs_and_these_before_constraints() -> None:
    said: list[BapipeError] = [PROVEN, UNPROVEN, LATE, UNMET]
    for errors in permutations(said):
        assert error_of_all(errors) is next(error for error in errors if error in (UNPROVEN, LATE))
    for errors in permutations([PROVEN, UNMET, Infeasible("nothing fits here, either")]):
        assert error_of_all(errors) is next(error for error in errors if error is not UNMET)
    assert error_of_all([UNMET]) is UNMET


def test_what_to_try_where_nothing_fits() -> None:
    layers = chain([1, 1], param_bytes=10).layers  # and as many bytes of gradients
    held = 20 + layers[0].optimizer_state_bytes
    assert what_to_try(layers, [held, 1], 4) == "Try more devices, smaller micro-batches, or a smaller mini-batch"
    assert what_to_try(layers, [held, 1], 1) == "Try more devices, devices with more memory, or a smaller mini-batch"
    assert what_to_try(layers, [held - 1, 1], 4).startswith(f"'l0' alone takes {held} bytes for its parameters")
