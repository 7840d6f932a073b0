"""The recomputed layers of a stage are the best of all subsets, and their bound is no larger than any of them."""

from itertools import chain, combinations
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.errors import Infeasible
from bapipe.formats.profile import LOSS, ModelProfile
from bapipe.planner.branch_and_bound.space import search_space
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages import recomputation
from bapipe.planner.stages.intervals import IntervalIndex
from bapipe.planner.stages.recomputation import LayerChoice, RecomputationBound, StashLimit
from bapipe.simulator.cuts import kept_tensor_bytes
from bapipe.simulator.simulate import simulate
from tests import builders
from tests.random_profiles import random_profile, same_devices
from tests.step_time import plan_step_time

ONE_DEVICE = same_devices(Random(0), 1)


def random_stage(seed: int) -> tuple[ModelProfile, int, int, list[StashLimit]]:
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
        limits.append(StashLimit(kind="a", kept=kept, in_backward=random.randint(0, min(kept, 2)), room_bytes=room))
    return profile, begin, end, limits


def subsets(profile: ModelProfile, begin: int, end: int) -> list[tuple[int, ...]]:
    """Every set of layers that can be recomputed without the whole stage."""
    own = [i for i in range(begin, end) if profile.layers[i].name != LOSS]
    every = chain.from_iterable(combinations(own, n) for n in range(len(own) + 1))
    return [chosen for chosen in every if len(chosen) < end - begin]


def least_ns(profile: ModelProfile, begin: int, end: int, limits: list[StashLimit]) -> int | None:
    """F of the best set, by trying each."""
    measured = profile.at(1)
    times = []
    for chosen in subsets(profile, begin, end):
        if fits(profile, begin, end, limits, chosen):
            times.append(sum(measured[i].forward_ns for i in chosen))
    return min(times, default=None)


def fits(profile: ModelProfile, begin: int, end: int, limits: list[StashLimit], chosen: tuple[int, ...]) -> bool:
    """Whether a stage that recomputes some layers is within the limits."""
    rows = list(zip(profile.layers, profile.at(1), strict=True))
    names = [layer.name for layer, _ in rows]
    again = sum(rows[i][1].stash_bytes for i in chosen)
    kept = sum(rows[i][1].stash_bytes for i in range(begin, end)) - again
    kept += kept_tensor_bytes(rows, names[begin:end], {names[i] for i in chosen})
    return all(limit.kept * kept + limit.in_backward * again <= limit.room_bytes for limit in limits)


def test_no_set_of_layers_is_faster() -> None:
    partly = impossible = 0
    for seed in range(150):
        profile, begin, end, limits = random_stage(seed)
        found = LayerChoice({"a": profile}, ONE_DEVICE, 1).best(begin, end, limits, "a", whole_fits=False)
        want = least_ns(profile, begin, end, limits)
        assert found.is_best
        assert found.fits == (want is not None), seed
        impossible += not found.fits
        if not found.fits:
            assert found.layers == frozenset()
            continue
        assert sum(profile.at(1)[i].forward_ns for i in found.layers) == found.total_ns == want, seed
        assert tuple(sorted(found.layers)) in subsets(profile, begin, end)
        partly += bool(found.layers)
    assert partly > 25
    assert impossible > 25


def test_a_whole_stage_is_recomputed_only_if_no_part_of_it_suffices() -> None:
    for seed in range(60):
        profile, begin, end, limits = random_stage(seed)
        found = LayerChoice({"a": profile}, ONE_DEVICE, 1).best(begin, end, limits, "a", whole_fits=True)
        want = least_ns(profile, begin, end, limits)
        whole = sum(m.forward_ns for m in profile.at(1)[begin:end])
        assert found.fits
        assert found.total_ns == min(whole, whole if want is None else want), seed
        assert (len(found.layers) == end - begin) == (want is None or want >= whole), seed


def test_a_choice_that_is_cut_short_fits_or_says_that_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "FEW_LABELS", 1)
    monkeypatch.setattr(recomputation, "MAX_LABELS", 1)
    slower = 0
    for seed in range(150):
        profile, begin, end, limits = random_stage(seed)
        found = LayerChoice({"a": profile}, ONE_DEVICE, 1).best(begin, end, limits, "a", whole_fits=False)
        want = least_ns(profile, begin, end, limits)
        if not found.fits:
            assert want is None or not found.is_best, seed
        else:
            assert want is not None, seed
            time = sum(profile.at(1)[i].forward_ns for i in found.layers)
            assert time == want if found.is_best else time >= want, seed
            assert fits(profile, begin, end, limits, tuple(found.layers)), seed
            slower += time > want
    assert slower > 0


def test_no_plan_exceeds_memory_where_the_choice_of_recomputed_layers_is_cut_short() -> None:
    """Late layers seem to save much, but the tensors between them and others take more: all points kept have those.

    The second device can hold its stage only if most layers in between are recomputed, for each of which F is in
    proportion to the stash.
    """
    random, num, giga = Random(1), 18, 10**9
    stashes = [random.randrange(10**6, 2 * 10**6) for _ in range(num)]
    most = sum(stashes)
    rows = [
        *((1000, 10, giga, 10**11), (1000, 1, 1, 10**10)),
        *((stash, stash, 1, giga) for stash in stashes),
        *((1000, 1, giga, giga), *[(10, most // 6, giga, giga)] * 6),
    ]
    profile = builders.chain([1] * len(rows))
    measured = tuple(
        replace(m, forward_ns=ns, stash_bytes=stash, output_bytes=(sent,))
        for m, (ns, stash, sent, _) in zip(profile.at(1), rows, strict=True)
    )
    layers = [replace(layer, param_bytes=row[3]) for layer, row in zip(profile.layers, rows, strict=True)]
    layers[num + 2] = replace(layers[num + 2], inputs=(*layers[num + 2].inputs, "t1"))
    profile = replace(profile, layers=tuple(layers), measurements=(replace(profile.measurements[0], layers=measured),))
    cluster = builders.devices(2, bytes_per_s=10**12)
    first, second = cluster.devices
    options = PlanOptions(minibatch_size=4, schedules=("gpipe",))
    cut_short = 0
    for room in range(0, 4 * most, most // 4):
        cluster = replace(
            cluster,
            devices=(
                replace(first, memory_bytes=2 * 10**11 + 10**10),
                replace(second, memory_bytes=74 * giga + room),
            ),
        )
        try:
            plan = plan_step_time({"a": profile}, cluster, options)
        except Infeasible as error:
            cut_short += not error.is_proven
            continue
        held = simulate(plan, {"a": profile}).memory
        assert all(m.total <= device.memory_bytes for m, device in zip(held, cluster.devices, strict=True))
        cut_short += not plan.certificate.proven_optimal
    assert cut_short


def test_bytes_beyond_the_precision_of_floats_are_told_apart() -> None:
    """The layer of 1 ms suffices to the byte; with the one of 1 s, hardly more bytes are saved."""
    profile = builders.chain([0, 1, 1000])
    (measured,) = profile.measurements
    stashes = 0, 2**54, 1
    layers = tuple(replace(m, stash_bytes=n) for m, n in zip(measured.layers, stashes, strict=True))
    profile = replace(profile, measurements=(replace(measured, layers=layers),))
    limit = StashLimit(kind="a", kept=4, in_backward=1, room_bytes=2**54 + 4)
    found = LayerChoice({"a": profile}, ONE_DEVICE, 1).best(0, 3, [limit], "a", whole_fits=True)
    assert found.layers == {1}


def test_the_bound_is_no_larger_than_any_set() -> None:
    tight = 0
    for seed in range(60):
        random = Random(seed)
        profile = random_profile(random, 6, (1,))
        index = IntervalIndex(range(7))
        bound, measured = RecomputationBound(index, profile.at(1)), profile.at(1)
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


def test_the_bound_holds_where_stashes_and_times_are_far_apart() -> None:
    """At the rate of a long layer with a stash of one byte, gigabytes would cost more than 64 bits hold."""
    tight = 0
    for seed in range(60):
        random = Random(seed)
        measured = [
            replace(m, forward_ns=10 ** random.randint(6, 9), stash_bytes=random.choice([1, 2, 10**9, 5 * 10**9]))
            for m in random_profile(random, 6, (1,)).at(1)
        ]
        profile = random_profile(random, 6, (1,))
        profile = replace(profile, measurements=(replace(profile.measurements[0], layers=tuple(measured)),))
        bound = RecomputationBound(IntervalIndex(range(7)), profile.at(1))
        for num in range(1, 7):
            for chosen in combinations(range(6), num):
                saved = sum(measured[i].stash_bytes for i in chosen)
                time = sum(measured[i].forward_ns for i in chosen)
                least = int(bound.least_ns(np.array([saved]), slice(5, 6))[0])
                assert 0 <= least <= time, (seed, chosen)
                tight += 2 * least > time
    assert tight > 200


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
    choice = LayerChoice({"a": wide}, ONE_DEVICE, 1)
    every = choice.best(
        0, 60, [StashLimit(kind="a", kept=4, in_backward=1, room_bytes=3 * stash)], "a", whole_fits=True
    )
    assert every.layers == frozenset(range(60))
    assert not every.is_best
    room = 3 * sum(m.stash_bytes for m in measured[:10])
    some = choice.best(0, 10, [StashLimit(kind="a", kept=4, in_backward=1, room_bytes=room)], "a", whole_fits=True)
    assert some.is_best


def test_after_the_deadline_a_stage_recomputes_all_of_its_layers() -> None:
    profile = random_profile(Random(0), 12, (1,))
    room = 3 * sum(m.stash_bytes for m in profile.at(1))
    limits = [StashLimit(kind="a", kept=4, in_backward=1, room_bytes=room)]
    found = LayerChoice({"a": profile}, ONE_DEVICE, 1, Deadline(0.0)).best(0, 12, limits, "a", whole_fits=True)
    assert found.layers == frozenset(range(12))
    assert not found.is_best
    ahead = LayerChoice({"a": profile}, ONE_DEVICE, 1).best(0, 12, limits, "a", whole_fits=True)
    assert ahead.is_best
    assert ahead.layers < found.layers


def test_the_bound_of_recomputation_is_of_the_replica_that_must_save_most() -> None:
    """Of 3 micro-batches one replica holds 2 at once, the other 1: of 2 x 300 bytes 500 fit if a layer is recomputed."""
    profile, cluster = builders.chain([1, 1, 1], stash_bytes=100), builders.devices(2, memory_bytes=500)
    space = search_space({"a": profile}, cluster, PlanOptions(minibatch_size=3, schedules=["gpipe"]))
    # [layers 0, 0 to 1, 0 to 2]
    (found_ns,) = [
        problem.lower_bound.costs.memory.recomputed_ns(placement, slice(0, 3))[0]
        for problem in space.problems
        for root in problem.roots
        for placement in root.first_placements
        if len(placement.device_classes) == 2
    ]
    assert found_ns.tolist() == pytest.approx([0, 0, builders.MS], rel=1e-5)
