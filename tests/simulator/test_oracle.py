"""The simulator against a second, slow one written from the rules alone, and against cases worked out by hand."""

import json
from typing import Any

import pytest
from hypothesis import given

from bapipe.errors import BapipeError
from bapipe.formats.codec import decode_as
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.simulator.simulate import simulate
from tests.oracles.hand_cases import CASES
from tests.oracles.random_plans import random_case
from tests.oracles.reference_simulator import simulate as reference
from tests.strategies import examples, plans_and_profiles

Tree = dict[str, Any]


def simulated(plan: Tree, profiles: dict[str, Tree]) -> Tree:
    """The timeline of bapipe's simulator in the format of the second simulator."""
    known = {kind: decode_as(json.dumps(tree).encode(), ModelProfile) for kind, tree in profiles.items()}
    timeline = simulate(decode_as(json.dumps(plan).encode(), Plan), known)
    name = timeline.devices
    return {
        "step_ns": timeline.step_ns,
        "spans": sorted((name[s.rank], str(s.action), s.start_ns, s.end_ns) for s in timeline.spans),
        "transfers": sorted(
            (name[t.source], name[t.target], str(t.phase), t.stage, t.microbatch, t.start_ns, t.end_ns)
            for t in timeline.transfers
        ),
        "syncs": sorted((s.stage, s.num_bytes, s.start_ns, s.end_ns) for s in timeline.syncs),
        "updates": sorted((name[u.rank], u.stage, u.start_ns, u.end_ns) for u in timeline.updates),
        "peak_bytes": {name[rank]: memory.total for rank, memory in enumerate(timeline.memory)},
    }


def sorted_lists(tree: Tree) -> Tree:
    return {key: sorted(map(tuple, value)) if isinstance(value, list) else value for key, value in tree.items()}


@pytest.mark.parametrize("name", CASES)
def test_cases_worked_out_by_hand(name: str) -> None:
    plan, profiles, want = CASES[name]
    timeline = simulated(plan, profiles)
    assert {key: timeline[key] for key in want} == sorted_lists(want)


@pytest.mark.parametrize("block", range(5))
def test_random_plans_agree_to_the_nanosecond(block: int) -> None:
    for seed in range(block * 1000, block * 1000 + 1000):
        plan, profiles = random_case(seed)
        assert simulated(plan, profiles) == sorted_lists(reference(plan, profiles)), seed


@examples(300)
@given(plans_and_profiles())
def test_generated_plans_agree_to_the_nanosecond(case: tuple[Tree, dict[str, Tree]]) -> None:
    plan, profiles = case
    assert simulated(plan, profiles) == sorted_lists(reference(plan, profiles))


def test_both_simulators_refuse_a_damaged_order() -> None:
    refused = 0
    for seed in range(300):
        plan, profiles = random_case(seed)
        for order in plan["order"]:
            if len(order) > 1:
                order[0], order[-1] = order[-1], order[0]
        try:
            reference(plan, profiles)
        except ValueError:
            refused += 1
            with pytest.raises(BapipeError):
                simulated(plan, profiles)
        else:
            assert simulated(plan, profiles) == sorted_lists(reference(plan, profiles)), seed
    assert refused > 100
