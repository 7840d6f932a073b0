"""The recomputed layers of a stage are the best of all subsets, and their bound is no larger than any of them."""

from itertools import chain, combinations
from random import Random

import numpy as np
from msgspec.structs import replace

from bapipe.formats.profile import LOSS, ModelProfile
from bapipe.planner.branch_and_bound.intervals import IntervalIndex
from bapipe.planner.branch_and_bound.recomputation import LayerChoice, MemoryLimit, RecomputationBound
from bapipe.planner.deadline import Deadline
from bapipe.simulator.cuts import kept_tensor_bytes
from tests.random_profiles import random_profile


def random_stage(seed: int) -> tuple[ModelProfile, int, int, list[MemoryLimit]]:
    """A profile with skip connections, layers [begin, end) of it, and some limits from too little to plenty."""
    random = Random(seed)
    profile = random_profile(random, random.randint(2, 8), (1,))
    if random.random() < 0.3:
        profile = replace(profile, layers=(*profile.layers[:-1], replace(profile.layers[-1], name=LOSS)))
    begin = random.randrange(len(profile.layers) - 1)
    end = random.randrange(begin + 1, len(profile.layers)) + 1
    stash = sum(m.stash_bytes for m in profile.at(1)[begin:end])
    limits = []
    for _ in range(random.choice([1, 1, 2, 3])):
        kept = random.randint(1, 5)
        room = int(kept * stash * random.uniform(0.2, 1.0))
        limits.append(MemoryLimit(kind="a", kept=kept, in_backward=random.randint(0, min(kept, 2)), room_bytes=room))
    return profile, begin, end, limits


def subsets(profile: ModelProfile, begin: int, end: int) -> list[tuple[int, ...]]:
    """Every set of layers that can be recomputed without the whole stage."""
    own = [i for i in range(begin, end) if profile.layers[i].name != LOSS]
    every = chain.from_iterable(combinations(own, n) for n in range(len(own) + 1))
    return [chosen for chosen in every if len(chosen) < end - begin]


def least_ns(profile: ModelProfile, begin: int, end: int, limits: list[MemoryLimit]) -> int | None:
    """F of the best set, by trying each."""
    rows = list(zip(profile.layers, profile.at(1), strict=True))
    names = [layer.name for layer, _ in rows]
    times = []
    for chosen in subsets(profile, begin, end):
        again = sum(rows[i][1].stash_bytes for i in chosen)
        kept = sum(rows[i][1].stash_bytes for i in range(begin, end)) - again
        kept += kept_tensor_bytes(rows, names[begin:end], {names[i] for i in chosen})
        if all(limit.kept * kept + limit.in_backward * again <= limit.room_bytes for limit in limits):
            times.append(sum(rows[i][1].forward_ns for i in chosen))
    return min(times, default=None)


def test_no_set_of_layers_is_faster() -> None:
    partly = impossible = 0
    for seed in range(150):
        profile, begin, end, limits = random_stage(seed)
        found = LayerChoice({"a": profile}, 1).best(begin, end, limits, "a", whole_fits=False)
        want = least_ns(profile, begin, end, limits)
        assert (found is None) == (want is None), seed
        impossible += found is None
        if found is None:
            continue
        assert found.is_best
        assert sum(profile.at(1)[i].forward_ns for i in found.layers) == want, seed
        assert tuple(sorted(found.layers)) in subsets(profile, begin, end)
        partly += bool(found.layers)
    assert partly > 25
    assert impossible > 25


def test_a_whole_stage_is_recomputed_only_if_no_part_of_it_suffices() -> None:
    for seed in range(60):
        profile, begin, end, limits = random_stage(seed)
        found = LayerChoice({"a": profile}, 1).best(begin, end, limits, "a", whole_fits=True)
        want = least_ns(profile, begin, end, limits)
        whole = sum(m.forward_ns for m in profile.at(1)[begin:end])
        assert found is not None
        assert (len(found.layers) == end - begin) == (want is None or want >= whole), seed


def test_the_bound_is_no_larger_than_any_set() -> None:
    tight = 0
    for seed in range(60):
        random = Random(seed)
        profile = random_profile(random, 6, (1,))
        index = IntervalIndex(range(7))
        bound, measured = RecomputationBound(index, profile, 1), profile.at(1)
        for begin, end in combinations(range(7), 2):
            rows = index.row(begin)
            number = rows.start + end - begin - 1
            for chosen in random.sample(list(combinations(range(begin, end), random.randint(0, end - begin))), 1):
                saved = sum(measured[i].stash_bytes for i in chosen)
                time = sum(measured[i].forward_ns for i in chosen)
                least = int(bound.least_ns(np.array([saved]), slice(number, number + 1))[0])
                assert 0 <= least <= time
                tight += 0 < time <= least + 2
    assert tight > 60


def test_a_long_stage_with_many_tensors_in_use_at_once_recomputes_all() -> None:
    """Every layer uses the outputs of the three before it, so that the choices of three layers matter at once."""
    profile = random_profile(Random(0), 60, (1,))
    layers = tuple(
        replace(layer, inputs=tuple(f"t{j}" for j in range(max(0, i - 3), i)) or ("x",), outputs=(f"t{i}",))
        for i, layer in enumerate(profile.layers)
    )
    measured = tuple(replace(m, output_bytes=(8,)) for m in profile.at(1))
    wide = replace(profile, layers=layers, measurements=(replace(profile.measurements[0], layers=measured),))
    stash = sum(m.stash_bytes for m in measured)
    choice = LayerChoice({"a": wide}, 1)
    every = choice.best(
        0, 60, [MemoryLimit(kind="a", kept=4, in_backward=1, room_bytes=3 * stash)], "a", whole_fits=True
    )
    assert every is not None
    assert every.layers == frozenset(range(60))
    assert not every.is_best
    room = 3 * sum(m.stash_bytes for m in measured[:10])
    some = choice.best(0, 10, [MemoryLimit(kind="a", kept=4, in_backward=1, room_bytes=room)], "a", whole_fits=True)
    assert some is not None
    assert some.is_best


def test_after_the_deadline_a_stage_recomputes_all_of_its_layers() -> None:
    profile = random_profile(Random(0), 12, (1,))
    room = 3 * sum(m.stash_bytes for m in profile.at(1))
    limits = [MemoryLimit(kind="a", kept=4, in_backward=1, room_bytes=room)]
    found = LayerChoice({"a": profile}, 1, Deadline(0.0)).best(0, 12, limits, "a", whole_fits=True)
    assert found is not None
    assert found.layers == frozenset(range(12))
    assert not found.is_best
    ahead = LayerChoice({"a": profile}, 1).best(0, 12, limits, "a", whole_fits=True)
    assert ahead is not None
    assert ahead.is_best
    assert ahead.layers < found.layers
