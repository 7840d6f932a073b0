"""The simulator against closed forms; `test_oracle.py` compares it with a second simulator."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from bapipe.errors import InvalidSchedule
from bapipe.formats.cluster import Cluster
from bapipe.formats.host_times import HostTimes
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement
from bapipe.planner.make import make
from bapipe.schedules import SCHEDULES
from bapipe.schedules.gpipe import gpipe
from bapipe.schedules.one_f_one_b import one_f_one_b
from bapipe.schedules.table import Schedule, parse_action
from bapipe.simulator.lanes import cost_on_lanes
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.simulate import simulate, simulate_schedule
from bapipe.simulator.stage import Stage, StageCost
from bapipe.simulator.stage_cost import fill_buckets
from bapipe.simulator.tied_weights import TiedGradient
from tests.builders import chain, devices, profile_of


def cluster(num_devices: int, latency_ns: int = 0) -> Cluster:
    """Devices whose links take a nanosecond for any bytes, to which times are rounded up."""
    return devices(num_devices, memory_bytes=0, bytes_per_s=10**18, latency_ns=latency_ns)


def equal_stages(num: int, f: int, b: int, send: int = 0, stash: int = 0) -> list[Stage]:
    cost = StageCost(forward_ns=f, input_grad_ns=b, weight_grad_ns=0, stash_bytes=stash)
    return [Stage(costs=(cost,), send_bytes=send, grad_bytes=send) for _ in range(num)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize(("f", "b"), [(1, 2), (5, 3), (10, 10)])
def test_equal_stages_meet_the_closed_form(name: str, p: int, m: int, f: int, b: int) -> None:
    """(m+p-1)(F+B): GPipe (arXiv:1811.06965, sec. 2.3), and PipeDream-flush (arXiv:2104.04473, sec. 2.2)."""
    timeline = simulate_schedule(SCHEDULES[name](p, m), equal_stages(p, f, b), cluster(p))
    assert timeline.step_ns == (m + p - 1) * (f + b)
    assert timeline.prediction(m).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("times", [[(3, 5), (7, 2), (4, 4)], [(9, 1), (1, 9)], [(2, 2), (8, 8), (2, 2), (5, 1)]])
@pytest.mark.parametrize("m", [1, 2, 5, 9])
def test_uneven_gpipe_meets_its_closed_form(times: list[tuple[int, int]], m: int) -> None:
    """sum f + (m-1) max f + sum b + (m-1) max b: two flow shops, one after the other."""
    stages = [Stage(costs=(StageCost(forward_ns=f, input_grad_ns=b, weight_grad_ns=0),)) for f, b in times]
    fs, bs = [f for f, _ in times], [b for _, b in times]
    want = sum(fs) + (m - 1) * max(fs) + sum(bs) + (m - 1) * max(bs)
    assert simulate_schedule(gpipe(len(times), m), stages, cluster(len(times))).step_ns == want


@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize("latency", [1, 4])
def test_small_latencies_add_to_gpipe_once_per_cut(p: int, latency: int) -> None:
    m, f, b = 2 * p, 100, 100
    timeline = simulate_schedule(gpipe(p, m), equal_stages(p, f, b, send=1), cluster(p, latency))
    assert timeline.step_ns == (m + p - 1) * (f + b) + 2 * (p - 1) * (latency + 1)


@pytest.mark.parametrize("p", [3, 4, 6])
@pytest.mark.parametrize("latency", [0, 3])
def test_small_latencies_add_to_1f1b_by_a_closed_form(p: int, latency: int) -> None:
    """c [2(p-1)m/p + 2(p-2)] if p divides m, with c the one-way transfer."""
    m, f, b, c = 2 * p, 1000, 1000, latency + 1
    timeline = simulate_schedule(one_f_one_b(p, m), equal_stages(p, f, b, send=1), cluster(p, latency))
    assert timeline.step_ns == (m + p - 1) * (f + b) + c * (2 * (p - 1) * m // p + 2 * (p - 2))


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("m", range(1, 9))
def test_stashes_in_flight(p: int, m: int) -> None:
    stages = equal_stages(p, 1, 1, stash=1)
    assert [memory.stash for memory in peak_memory(gpipe(p, m), stages)] == [m] * p
    assert [memory.stash for memory in peak_memory(one_f_one_b(p, m), stages)] == [min(p - s, m) for s in range(p)]


def test_memory_at_the_peak_is_reported_by_kind() -> None:
    cost = StageCost(
        forward_ns=1, input_grad_ns=1, weight_grad_ns=1, param_bytes=100, optimizer_bytes=50, stash_bytes=7, workspace_bytes=3
    )  # fmt: skip
    stages = [Stage(costs=(cost,), send_bytes=11, grad_bytes=5), Stage(costs=(cost,))]
    first, second = peak_memory(one_f_one_b(2, 4), stages)
    assert (first.params, first.gradients, first.optimizer, first.stash, first.workspace) == (100, 100, 50, 14, 3)
    assert (first.buffers, second.buffers) == (4 * 5, 4 * 11)
    assert second.stash == 7


def test_memory_over_time_and_the_action_at_its_peak() -> None:
    """1F1B, 2 stages, 3 micro-batches, stashes of 7 and 9 bytes, workspaces of 1: F0 F1 B0 F2 B1 B2 on the first."""
    cost = StageCost(forward_ns=1, input_grad_ns=1, weight_grad_ns=1, stash_bytes=7, workspace_bytes=1)
    stages = [Stage(costs=(cost,)), Stage(costs=(replace(cost, stash_bytes=9),))]
    timeline = simulate_schedule(one_f_one_b(2, 3), stages, cluster(2))
    assert [[m.stash for m in rank] for rank in timeline.memory_over_time] == [[7, 14, 14, 14, 14, 7], [9] * 6]
    assert [str(timeline.peak_action(rank)) for rank in range(2)] == ["0F1", "1F0"]
    assert [memory.total for memory in timeline.memory] == [15, 10]


def test_scaling_all_times_scales_the_step() -> None:
    times = [(3, 5), (7, 2), (4, 4)]
    steps = [
        simulate_schedule(
            one_f_one_b(3, 7),
            [
                Stage(
                    costs=(StageCost(forward_ns=k * f, input_grad_ns=k * b, weight_grad_ns=0),),
                    send_bytes=1,
                    grad_bytes=1,
                )
                for f, b in times
            ],
            cluster(3, 10 * k - 1),
        ).step_ns
        for k in (1, 2, 6)
    ]
    assert steps == [steps[0], 2 * steps[0], 6 * steps[0]]


def test_a_slower_link_never_speeds_a_named_schedule_up() -> None:
    stages = equal_stages(4, 10, 15, send=1)
    for name in ("gpipe", "1f1b"):
        steps = [
            simulate_schedule(SCHEDULES[name](4, 9), stages, cluster(4, latency)).step_ns for latency in range(0, 60, 3)
        ]
        assert all(a <= b for a, b in pairwise(steps))


def side_by_side(num_devices: int, latency_ns: int = 0) -> Cluster:
    plain = cluster(num_devices, latency_ns)
    parallel = tuple(msgspec.structs.replace(device, side_by_side=True) for device in plain.devices)
    return msgspec.structs.replace(plain, devices=parallel)


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("m", [1, 2, 5, 12, 20])
@pytest.mark.parametrize(("f", "b", "transfer"), [(3, 5, 0), (10, 10, 7), (1, 9, 10), (4, 1, 0)])
def test_fbp_as_meets_its_closed_form(p: int, m: int, f: int, b: int, transfer: int) -> None:
    """(m+2p-1)(F+B) and 2(p-s) stashes on stage s from 0 (store and forward); transfers of up to F+B add up once."""
    stages = equal_stages(p, f, b, send=1 if transfer else 0, stash=1)
    stages = [replace(stage, costs=(cost_on_lanes(stage.costs[0], f, b),)) for stage in stages]
    timeline = simulate_schedule(SCHEDULES["fbp-as"](p, m), stages, side_by_side(p, max(0, transfer - 1)))
    assert timeline.step_ns == (m + 2 * p - 1) * (f + b) + 2 * (p - 1) * transfer
    if not transfer:
        assert [memory.stash for memory in timeline.memory] == [min(2 * (p - s), m) for s in range(p)]
    assert all(rank.idle_ns >= 0 for rank in timeline.prediction(m).ranks)


def test_lanes_hold_the_workspaces_of_both_actions() -> None:
    """One device, F 2, I 4, W 2, so 8, 5 and 3 on its lanes: F0 0-8, F1 and I0 from 8, W0 from 13, B1 from 16."""
    cost = StageCost(forward_ns=2, input_grad_ns=4, weight_grad_ns=2, stash_bytes=10, workspace_bytes=3)
    order = (tuple(map(parse_action, ["0F0", "0F1", "0I0", "0W0", "0B1"])),)
    schedule = Schedule(devices=((0,),), num_microbatches=2, order=order)
    timeline = simulate_schedule(schedule, [Stage(costs=(cost_on_lanes(cost, 2, 6),))], side_by_side(1))
    assert [(str(s.action), s.start_ns, s.end_ns) for s in timeline.spans] == [
        ("0F0", 0, 8), ("0F1", 8, 16), ("0I0", 8, 13), ("0W0", 13, 16), ("0B1", 16, 24)
    ]  # fmt: skip
    assert timeline.usage == (((10, 3), (20, 6), (20, 6), (20, 6), (10, 3)),)
    assert [len(lane) for lane in timeline.lanes(0)] == [2, 3]
    columns = timeline.columns()
    assert columns.timeline() == timeline
    assert columns.spans[0].num_lanes == 2
    assert columns.prediction(2).ranks[0].busy_ns == 24  # both lanes run at once


def test_lanes_round_i_and_w_together() -> None:
    """F, I and W of 1: a third of the compute for F, two for B. I takes 1.5, so 2; I and W 3, so W 1 and not 2."""
    lanes = cost_on_lanes(StageCost(forward_ns=1, input_grad_ns=1, weight_grad_ns=1), 1, 2)
    assert (lanes.forward_ns, lanes.input_grad_ns, lanes.weight_grad_ns, lanes.backward_ns) == (3, 2, 1, 3)


def test_the_stage_before_a_cut_says_how_many_bytes_cross_it() -> None:
    """Kinds a, b, a say 20, 50 and 20 bytes for each tensor: 20 ns over the first cut, 50 over the second, both ways.

    Buffers are 20, 20 + 50 and 50; with recomputation the inputs of 20 and 50 are kept, and stashes of 7 made again.
    """
    profiles = {kind: chain([1] * 3, stash_bytes=7, output_bytes=size) for kind, size in (("a", 20), ("b", 50))}
    profiles["b"] = msgspec.structs.replace(
        profiles["b"], device=msgspec.structs.replace(profiles["b"].device, kind="b")
    )
    plain = devices(3)
    kinds = tuple(msgspec.structs.replace(d, kind=kind) for d, kind in zip(plain.devices, "aba", strict=True))
    of_kinds = msgspec.structs.replace(plain, devices=kinds)
    made = make(profiles, of_kinds, minibatch_size=1, cuts=[1, 2], devices=["d0", "d1", "d2"], recompute=[1, 2])
    timeline = simulate(made, profiles)
    times = {(t.source, t.target): t.end_ns - t.start_ns for t in timeline.transfers}
    assert times == {(0, 1): 20, (1, 2): 50, (2, 1): 50, (1, 0): 20}
    assert [memory.buffers for memory in timeline.memory] == [20, 70, 50]
    assert [memory.stash for memory in timeline.memory] == [7, 20 + 7, 50 + 7]


def test_a_deadlock_is_named() -> None:
    order = tuple(tuple(map(parse_action, text.split())) for text in ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    schedule = Schedule(devices=((0,), (1,)), num_microbatches=2, order=order)
    with pytest.raises(InvalidSchedule) as caught:
        simulate_schedule(schedule, equal_stages(2, 1, 1), cluster(2))
    assert str(caught.value) == "deadlock: each waits for another: rank 0 at 0B0, rank 1 at 1F1"


def test_buckets_close_at_25_mib_and_end_with_a_gradient() -> None:
    mib = 2**20
    assert fill_buckets([]) == fill_buckets([0, 0]) == ()
    assert fill_buckets([0, 10 * mib, 0, 20 * mib, 0, 5, 0]) == ((4, 30 * mib), (6, 5))
    assert fill_buckets([25 * mib, 25 * mib]) == ((1, 25 * mib), (2, 25 * mib))


def test_a_separate_backward_time_and_the_stash_kept_for_w() -> None:
    """B takes 3 where I and W take 2 + 2; between I and W five more bytes are held."""
    cost = StageCost(
        forward_ns=1,
        input_grad_ns=2,
        weight_grad_ns=2,
        whole_backward_ns=3,
        stash_bytes=10,
        gradient_stash_bytes=5,
        workspace_bytes=1,
    )
    for text, step_ns, peak in (
        ("0F0 0B0 0F1 0B1", 8, 11),
        ("0F0 0I0 0W0 0F1 0B1", 9, 16),
        ("0F0 0I0 0F1 0I1 0W0 0W1", 10, 31),
    ):
        table = Schedule(devices=((0,),), num_microbatches=2, order=(tuple(map(parse_action, text.split())),))
        timeline = simulate_schedule(table, [Stage(costs=(cost,))], cluster(1))
        assert (timeline.step_ns, timeline.memory[0].total) == (step_ns, peak)


def test_a_speed_divides_neither_the_times_of_the_host_nor_the_exchange_of_members() -> None:
    """F 100 and B 200, of which members exchange 40 and 60; besides, a host that takes 90 and 130 for them."""
    plain = profile_of(
        "one layer",
        [LayerProfile(name="l", kind="Layer", inputs=("x",), outputs=("y",), param_bytes=0, optimizer_state_bytes=0)],
        [LayerMeasurement(forward_ns=100, input_grad_ns=100, weight_grad_ns=100, stash_bytes=0, output_bytes=(0,))],
    )

    def step_ns(speed: float, members: int = 0, **figures: object) -> int:
        layer = msgspec.structs.replace(plain.measurements[0].layers[0], **figures)
        of_group = msgspec.structs.replace(plain.device, members=members, split="filter") if members else plain.device
        measurement = msgspec.structs.replace(plain.measurements[0], layers=(layer,))
        profile = msgspec.structs.replace(plain, device=of_group, measurements=(measurement,))
        device = msgspec.structs.replace(devices(1).devices[0], speed=speed)
        if members:
            device = msgspec.structs.replace(device, members=tuple(f"m{i}" for i in range(members)))
        one = msgspec.structs.replace(devices(1), devices=(device,))
        return make(profile, one, cuts=[], schedule="1f1b", minibatch_size=1, microbatch_size=1).prediction.step_ns

    host = HostTimes(forward_ns=90, input_grad_ns=50, weight_grad_ns=80, backward_ns=130)
    exchange = {"members": 2, "forward_exchange_ns": 40, "backward_exchange_ns": 60}
    for speed, alone, with_host, with_exchange in (
        (0.5, 600, 600, 120 + 40 + 280 + 60),
        (1.0, 300, 300, 300),
        (2.0, 150, 90 + 130, 30 + 40 + 70 + 60),
        (4.0, 75, 90 + 130, 15 + 40 + 35 + 60),
    ):
        found = step_ns(speed), step_ns(speed, host=host), step_ns(speed, **exchange)
        assert found == (alone, with_host, with_exchange), speed


def test_gradients_that_stages_share_are_summed_after_both() -> None:
    """Two stages, one micro-batch: F, F, B, B, then a ring of two with 50 of 100 bytes each way, then the updates."""
    shared = (TiedGradient(owner="embedding", num_bytes=100),)
    stages = [
        Stage(
            costs=(StageCost(forward_ns=10, input_grad_ns=10, weight_grad_ns=10, update_ns=ns),), tied_gradients=shared
        )
        for ns in (5, 3)
    ]
    timeline = simulate_schedule(gpipe(2, 1), stages, devices(2, memory_bytes=0, latency_ns=7))
    assert [(sync.stage, sync.num_bytes, sync.start_ns, sync.end_ns) for sync in timeline.syncs] == [
        (0, 100, 60, 60 + 2 * (7 + 50))
    ]
    assert [(update.stage, update.start_ns, update.end_ns) for update in timeline.updates] == [
        (0, 174, 179), (1, 174, 177),
    ]  # fmt: skip
    assert timeline.step_ns == 179


@pytest.mark.parametrize(("no_gradient", "step_ms"), [((), 8), (("t1",), 7)])
def test_gradients_are_sent_back_unless_the_profile_says_that_there_are_none(
    no_gradient: tuple[str, ...], step_ms: int
) -> None:
    """F of 1 ms, B of 2 and a transfer of 1, whether or not the first layer is trained: 1 + 1 + 1 + 2 (+ 1) + 2."""
    profile = chain([1, 1], param_bytes=8, output_bytes=10**6)
    first, last = profile.layers
    untrained = msgspec.structs.replace(first, trained_bytes=0, no_gradient=no_gradient)
    profile = msgspec.structs.replace(profile, layers=(untrained, last))
    made = make(profile, devices(2, bytes_per_s=10**9), minibatch_size=1, cuts=["l1"], schedule="1f1b")
    assert made.prediction.step_ns == step_ms * 10**6
