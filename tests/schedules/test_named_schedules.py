"""Every named schedule: legal for any ranks and micro-batches, never below the bounds, and as its closed forms say."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from bapipe.errors import InvalidSchedule
from bapipe.schedules import LOOPED, ORDER_OF_RANK, SCHEDULES
from bapipe.schedules.eager_one_f_one_b import eager_one_f_one_b
from bapipe.schedules.gpipe import gpipe
from bapipe.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b
from bapipe.schedules.k_f_k_b import k_f_k_b
from bapipe.schedules.looped_breadth_first import looped_breadth_first
from bapipe.schedules.one_f_one_b import one_f_one_b
from bapipe.schedules.placement import merge_stages, merged_named
from bapipe.schedules.table import Schedule
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage import Stage, StageCost
from bapipe.simulator.timeline import Timeline
from tests.builders import devices

EVERY: dict[str, Callable[[int, int], Schedule]] = {
    **SCHEDULES,
    **LOOPED,
    "1f1b of depth 2": lambda p, m: eager_one_f_one_b(p, m, depths=[2] * p),
    **{f"{k}f{k}b": partial(k_f_k_b, k=k) for k in (1, 3)},
    **{f"interleaved-1f1b of {v}": partial(interleaved_one_f_one_b, v=v) for v in (1, 3)},
    **{f"looped-bfs of {v}": partial(looped_breadth_first, v=v) for v in (1, 3)},
}

TIMES = [(1, 1, 1), (5, 3, 2), (3, 5, 2), (2, 3, 6), (10, 12, 9)]
"""F, I, W."""

RANKS_AND_MICROBATCHES = [(p, m) for p in range(1, 9) for m in range(1, 3 * p + 1)]


def run(schedule: Schedule, f: int, i: int, w: int, transfer_ns: int = 0) -> Timeline:
    """Simulates equal stages on links with `transfer_ns` per transfer."""
    latency_ns = max(0, transfer_ns - 1)  # a byte takes 1 ns to round up to
    cluster = devices(len(schedule.order), memory_bytes=0, bytes_per_s=10**18, latency_ns=latency_ns)
    cost = StageCost(forward_ns=f, input_grad_ns=i, weight_grad_ns=w)
    num_bytes = 1 if transfer_ns else 0
    stage = Stage(costs=(cost,), send_bytes=num_bytes, grad_bytes=num_bytes)
    return simulate_schedule(schedule, [stage] * schedule.num_stages, cluster)


def bubble_ns(schedule: Schedule, f: int, i: int, w: int, transfer_ns: int = 0) -> int:
    """Idle time of a rank, which is the same for all: each runs equally many F, I and W."""
    stages_a_rank = schedule.num_stages // len(schedule.order)
    return run(schedule, f, i, w, transfer_ns).step_ns - stages_a_rank * schedule.num_microbatches * (f + i + w)


def stashes(schedule: Schedule) -> Sequence[int]:
    """The most stashes in flight on each rank."""
    cost = StageCost(forward_ns=1, input_grad_ns=1, weight_grad_ns=1, stash_bytes=1)
    return [memory.stash for memory in peak_memory(schedule, [Stage(costs=(cost,))] * schedule.num_stages)]


@pytest.mark.parametrize("name", EVERY)
def test_legal_and_never_below_the_bounds(name: str) -> None:
    """The simulator checks the table; a step is no shorter than a rank's work after its first input, or one micro-batch."""
    for p, m in RANKS_AND_MICROBATCHES:
        schedule = EVERY[name](p, m)
        assert len(schedule.order) == p
        assert schedule.num_microbatches == m
        v = schedule.num_stages // p
        f, i, w = TIMES[(p + m) % len(TIMES)]
        step_ns = run(schedule, f, i, w).step_ns
        assert step_ns >= v * m * (f + i + w) + (p - 1) * f
        assert step_ns >= v * p * (f + i) + w


@pytest.mark.parametrize("name", EVERY)
def test_every_rank_has_as_many_stages(name: str) -> None:
    for p in range(1, 9):
        devices = EVERY[name](p, 2).devices
        v = len(devices) // p
        assert sorted(devices) == sorted([(r,) for r in range(p)] * v)
    expected = {"zb-v": "V", "v-half": "V", "v-min": "V", "dualpipe-v": "V"}.get(name, "loop")
    want = [0, 1, 2, 2, 1, 0] if expected == "V" else [0, 1, 2] * v
    assert [ranks[0] for ranks in EVERY[name](3, 2).devices] == want


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b+2", "eager-1f1b", "2f2b", "3f3b"])
@pytest.mark.parametrize(("f", "i", "w"), TIMES[:3])
def test_whole_backwards_idle_as_gpipe(name: str, f: int, i: int, w: int) -> None:
    """(p-1)(F+B), for any m."""
    for p, m in RANKS_AND_MICROBATCHES:
        assert bubble_ns(EVERY[name](p, m), f, i, w) == (p - 1) * (f + i + w)


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("f", "i", "w"), TIMES[:3])
def test_more_stages_a_rank_idle_less(v: int, f: int, i: int, w: int) -> None:
    """(p-1)(F+B) of one of the smaller stages: interleaved where p divides m, looped where p <= m.

    With m < p, both idle (v-1)(p-m)(F+B) more. Elsewhere, interleaved takes no longer than with m rounded up.
    """
    for p, m in RANKS_AND_MICROBATCHES:
        want = (p - 1 + (v - 1) * max(0, p - m)) * (f + i + w)
        interleaved = interleaved_one_f_one_b(p, m, v=v)
        assert bubble_ns(looped_breadth_first(p, m, v=v), f, i, w) == want
        if m <= p or m % p == 0:
            assert bubble_ns(interleaved, f, i, w) == want
        else:
            rounded_up = -(-m // p) * p
            assert run(interleaved, f, i, w).step_ns <= (v * rounded_up + p - 1) * (f + i + w)


@pytest.mark.parametrize(("f", "i", "w"), TIMES)
def test_split_backwards_idle_less(f: int, i: int, w: int) -> None:
    """(p-1)(F+I-min(F, I, W)) for ZB-H1 and 1F1B with 2BP, m >= p; the paper's F+I-W holds where W <= F and W <= I.

    (p-1)max(F, F+I-2W) for ZB-H2, m >= 2p-1. (p-1)(F+I) for GPipe with 2BP, any m.
    """
    for p, m in RANKS_AND_MICROBATCHES:
        assert bubble_ns(SCHEDULES["gpipe-2bp"](p, m), f, i, w) == (p - 1) * (f + i)
        if m >= p:
            assert bubble_ns(SCHEDULES["zb-h1"](p, m), f, i, w) == (p - 1) * (f + i - min(f, i, w))
            assert bubble_ns(SCHEDULES["1f1b-2bp"](p, m), f, i, w) == (p - 1) * (f + i - min(f, i, w))
        if m >= 2 * p - 1:
            assert bubble_ns(SCHEDULES["zb-h2"](p, m), f, i, w) == (p - 1) * max(f, f + i - 2 * w)


@pytest.mark.parametrize("unit", [1, 7])
def test_v_shapes_of_equal_times(unit: int) -> None:
    """F = I = W: (p-1)F is the least any table can idle; ZB-V reaches it where m >= p, DualPipeV where m >= 2p.

    V-Half idles (3p-7)F, p even and at least 4, or (3p-4)F, p odd and at least 3; V-Min (4p-7)F where 3 divides p, else
    (4p-5)F, p at least 4; all for m >= p.
    """
    for p, m in RANKS_AND_MICROBATCHES:
        if m >= p:
            assert bubble_ns(LOOPED["zb-v"](p, m), unit, unit, unit) == (p - 1) * unit
        if m >= 2 * p:
            assert bubble_ns(LOOPED["dualpipe-v"](p, m), unit, unit, unit) == (p - 1) * unit
        if m >= p >= 3:
            half, third = 3 * p - (7 if p % 2 == 0 else 4), 4 * p - (7 if p % 3 == 0 else 5)
            assert bubble_ns(LOOPED["v-half"](p, m), unit, unit, unit) == half * unit
            assert bubble_ns(LOOPED["v-min"](p, m), unit, unit, unit) == third * unit


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("1f1b+1", lambda p, m, r: min(m, p - r + 1, 2 * (p - 1 - r) + 1)),
        ("1f1b+2", lambda p, m, r: min(m, p - r + 2, 2 * (p - 1 - r) + 1)),
        ("eager-1f1b", lambda p, m, r: min(m, 2 * (p - 1 - r) + 1)),
        ("2f2b", lambda p, m, r: min(m, 2 * (p - r))),
        ("3f3b", lambda p, m, r: min(m, 3 * (p - r))),
        ("interleaved-1f1b of 1", lambda p, m, r: min(m, 2 * (p - 1 - r) + 1)),
        ("looped-bfs", lambda p, m, r: 2 * m),
        ("looped-bfs of 3", lambda p, m, r: 3 * m),
        ("gpipe-2bp", lambda p, m, r: m),
        ("1f1b-2bp", lambda p, m, r: m),
    ],
)
def test_stashes_of_each_rank(name: str, most: Callable[[int, int, int], int]) -> None:
    """For any m."""
    for p, m in RANKS_AND_MICROBATCHES:
        assert stashes(EVERY[name](p, m)) == [most(p, m, r) for r in range(p)]


@pytest.mark.parametrize("v", [2, 3])
def test_stashes_of_interleaved(v: int) -> None:
    """min((v-1)p + 2(p-1-r) + 1, vm) where p divides m, and no more elsewhere."""
    for p, m in RANKS_AND_MICROBATCHES:
        want = [min(v * m, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]
        got = stashes(interleaved_one_f_one_b(p, m, v=v))
        assert got == want if m % p == 0 else all(a <= b for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("name", "num_needed", "most"),
    [
        ("zb-h1", lambda p: p, lambda p: p),
        ("zb-h2", lambda p: 2 * p - 1, lambda p: 2 * p - 1),
        ("zb-v", lambda p: 2 * p - 1, lambda p: 2 * p),
        ("dualpipe-v", lambda p: 2 * p, lambda p: 2 * p + 1),
    ],
)
def test_stashes_are_equal_on_all_ranks(
    name: str, num_needed: Callable[[int], int], most: Callable[[int], int]
) -> None:
    """From `num_needed` micro-batches on; fewer keep no more."""
    for p, m in RANKS_AND_MICROBATCHES:
        got = stashes(EVERY[name](p, m))
        assert got == [most(p)] * p if m >= num_needed(p) else max(got) <= most(p)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("zb-v", lambda p, m: min(2 * m, 2 * p)),
        ("v-half", lambda p, m: min(2 * m, 2 * (p // 2 + 1))),
        ("v-min", lambda p, m: min(2 * m, 2 * ((p + 1) // 3 + 1))),
    ],
)
def test_stashes_of_the_fullest_rank(name: str, most: Callable[[int, int], int]) -> None:
    """For any m."""
    for p, m in RANKS_AND_MICROBATCHES:
        assert max(stashes(LOOPED[name](p, m))) == most(p, m)


@pytest.mark.parametrize(("f", "b"), [(100, 100), (100, 200), (200, 100)])
def test_transfers_that_hide(f: int, b: int) -> None:
    """A one-way transfer of c adds only what the first and the last micro-batch wait.

    2(p-1)c: eager 1F1B while c <= (F+B)/2, kFkB with k > 1 while c <= min(F, B), looped where m >= 2p and c is short;
    2(vp-1)c: interleaved 1F1B while c <= min(F, B), where p divides m.
    """
    for p in (2, 3, 4, 6):
        for m in (p, 2 * p, 2 * p + 1, 4 * p):
            whole = (p - 1) * (f + b)
            for c in (1, 20, (f + b) // 2):
                assert bubble_ns(eager_one_f_one_b(p, m), f, b, 0, c) == whole + 2 * (p - 1) * c
            for c in (1, 20, min(f, b)):
                if m % p == 0:
                    assert bubble_ns(interleaved_one_f_one_b(p, m), f, b, 0, c) == whole + 2 * (2 * p - 1) * c
                assert bubble_ns(k_f_k_b(p, m), f, b, 0, c) == whole + 2 * (p - 1) * c
                assert bubble_ns(k_f_k_b(p, m, k=3), f, b, 0, c) == whole + 2 * (p - 1) * c
            if m >= 2 * p:
                assert bubble_ns(looped_breadth_first(p, m), f, b, 0, 20) == whole + 2 * (p - 1) * 20


def test_options_reach_the_other_schedules() -> None:
    for p, m in [(1, 1), (3, 2), (3, 7), (4, 8)]:
        assert eager_one_f_one_b(p, m, depths=[p - s for s in range(p)]) == one_f_one_b(p, m)
        assert eager_one_f_one_b(p, m, depths=[m] * p) == k_f_k_b(p, m, k=m) == looped_breadth_first(p, m, v=1)
        assert k_f_k_b(p, m, k=1) == one_f_one_b(p, m)
        assert looped_breadth_first(p, m, v=1) == gpipe(p, m)
        assert interleaved_one_f_one_b(p, m, v=1) == eager_one_f_one_b(p, m)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: eager_one_f_one_b(3, 4, depths=[3, 2]), "depths [3, 2] are 2, for 3 ranks: give one for each rank"),
        (lambda: eager_one_f_one_b(2, 4, depths=[1, 0]), "depths [1, 0] hold 0: give each rank at least 1"),
        (
            lambda: eager_one_f_one_b(2, 4, depths=[1, 2]),
            "depths [1, 2] rise along the pipeline, a deadlock: give them in falling order",
        ),
        (lambda: k_f_k_b(2, 4, k=0), "groups of 0 micro-batches: give k of at least 1"),
        (lambda: interleaved_one_f_one_b(2, 4, v=0), "0 stages a rank: give v of at least 1"),
        (lambda: looped_breadth_first(2, 4, v=0), "0 stages a rank: give v of at least 1"),
    ],
)
def test_options_that_are_refused(call: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("schedule", "rank", "order"),
    [
        (SCHEDULES["eager-1f1b"](3, 5), 1, "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4"),
        (SCHEDULES["1f1b+1"](4, 6), 1, "1F0 1F1 1F2 1F3 1B0 1F4 1B1 1F5 1B2 1B3 1B4 1B5"),
        (SCHEDULES["1f1b+1"](3, 4), 2, "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
        (SCHEDULES["2f2b"](2, 4), 1, "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3"),
        (SCHEDULES["zb-h1"](3, 4), 1, "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3"),
        (SCHEDULES["zb-h2"](2, 4), 1, "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"),
        (SCHEDULES["gpipe-2bp"](2, 2), 0, "0F0 0F1 0I0 0I1 0W0 0W1"),
        (SCHEDULES["1f1b-2bp"](3, 4), 1, "1F0 1F1 1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3"),
        (LOOPED["looped-bfs"](2, 2), 1, "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"),
        (LOOPED["interleaved-1f1b"](2, 2), 1, "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"),
        (LOOPED["zb-v"](2, 3), 1, "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2"),
        (LOOPED["v-half"](2, 3), 1, "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2"),
        (LOOPED["v-min"](2, 3), 1, "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2"),
        (
            LOOPED["dualpipe-v"](2, 4),
            1,
            "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
        ),
    ],
)
def test_the_orders_that_docstrings_show(schedule: Schedule, rank: int, order: str) -> None:
    assert " ".join(map(str, schedule.order[rank])) == order


@pytest.mark.parametrize("name", ORDER_OF_RANK)
def test_a_rank_by_itself_has_the_order_that_it_has_in_the_table(name: str) -> None:
    for num_ranks, num_microbatches in ((1, 1), (3, 2), (4, 9)):
        table = SCHEDULES[name](num_ranks, num_microbatches)
        rows = [ORDER_OF_RANK[name](rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
        assert tuple(rows) == table.order
        groups = [(0,), tuple(range(1, num_ranks))] if num_ranks > 1 else [(0,)]
        named = merged_named(name, groups, num_microbatches, num_ranks, lambda: pytest.fail("not needed"))
        assert named == merge_stages(table, groups, num_ranks)
