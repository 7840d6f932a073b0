"""What the runtime calls when tensors are not sent by gloo, run by NCCL's rules: no deadlock, and about as fast as predicted.

Each rank runs a step in this process, in a group of torch's for tests whose transfers do nothing; its calls are recorded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bapipe.equivalence.sample_dims import BY_ROWS
from bapipe.equivalence.target_weights import WeightsAhead
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.runtime import transfers
from bapipe.runtime.call_order import CallOrder
from bapipe.runtime.clock import CpuClock
from bapipe.runtime.executor import ScheduleExecutor
from bapipe.runtime.local_stage import LocalStage
from bapipe.runtime.loss_weights import LossWeights
from bapipe.runtime.process_groups import OwnGroups, connect_channels
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.runtime.rng import PerOperatorRng
from bapipe.runtime.runnable import ranks_with_stage
from bapipe.runtime.stage_executors import LossModule
from bapipe.schedules import ALL, SIDE_BY_SIDE
from bapipe.schedules.table import Action, Schedule
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage import Stage, StageCost
from tests.oracles.nccl_queues import Call, Compute, Post, Wait, gets_through_if_hosts_wait, step_ns
from tests.runtime.test_transfers import random_schedule
from tests.strategies import drawn, examples

CPU = torch.device("cpu")
NAMED = [name for name in ALL if name not in SIDE_BY_SIDE]

SLOWER = {"gpipe": 0.05, "gpipe-2bp": 0.05, "v-half": 0.04, "looped-bfs": 0.11}
"""By how much a step is longer than predicted if a transfer takes 10 % of a forward; others 0.03."""


class Scale(nn.Module):
    """A stage of a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * self.weight,)


class RecordedWork:
    def __init__(self, calls: list[Call], number: int) -> None:
        self.calls, self.number = calls, number

    def wait(self, timeout: timedelta) -> None:
        self.calls.append(Wait(self.number))


class RecordedExecutor(ScheduleExecutor):
    """Notes what it computes among the transfers."""

    calls: list[Call]
    stages: Sequence[Stage]

    def _timed(self, action: Action, call: Any) -> Any:
        def computed() -> Any:
            self.calls.append(Compute(self.stages[action.stage].costs[0].ns(action.phase)))
            return call()

        return super()._timed(action, computed)


def _loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return (output[0] - target).sum()


@contextmanager
def recorded_transfers(calls: list[Call], transfer_ns: int) -> Iterator[None]:
    def recorder(is_send: bool) -> Any:
        def post(
            tensor: Tensor, group: Any = None, group_dst: int = -1, group_src: int = -1, tag: int = 0
        ) -> RecordedWork:
            number = len(calls)
            calls.append(Post(number, group.group_name, group_dst if is_send else group_src, is_send, transfer_ns))
            return RecordedWork(calls, number)

        return post

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "dist", SimpleNamespace(isend=recorder(True), irecv=recorder(False)))
        yield


def recorded_calls(schedule: Schedule, stages: Sequence[Stage], transfer_ns: int) -> list[list[Call]]:
    """The calls of each rank that has a stage."""
    ranks = ranks_with_stage(schedule)
    return [_calls_of(schedule, stages, transfer_ns, ranks, process) for process in range(len(ranks))]


def _calls_of(
    schedule: Schedule, stages: Sequence[Stage], transfer_ns: int, ranks: tuple[int, ...], process: int
) -> list[Call]:
    calls: list[Call] = []
    dist.init_process_group("fake", store=FakeStore(), rank=process, world_size=len(ranks))
    try:
        layout = ProcessLayout(schedule=schedule, ranks=ranks, rank=ranks[process], device=CPU, group=None)
        with recorded_transfers([], 0):
            channels = connect_channels(layout, OwnGroups(layout), CallOrder())
        rng = PerOperatorRng(0, CPU)
        own = [s for s, devices in enumerate(schedule.devices) if ranks[process] in devices]
        executor = RecordedExecutor(
            layout,
            [_local_stage(s, schedule.num_stages) for s in own],
            channels=channels,
            loss=LossModule(_loss, _loss),
            weights=LossWeights(WeightsAhead(_loss, _loss, (), (BY_ROWS,), CPU), (0,), lambda part: part, rng),
            clock=CpuClock(),
            rng=rng,
        )
        executor.calls, executor.stages = calls, stages
        batch = torch.zeros(schedule.num_microbatches, 1)
        with recorded_transfers(calls, transfer_ns):
            executor.run([batch] if 0 in own else [], {}, batch if schedule.num_stages - 1 in own else None)
        assert executor.order == schedule.order[ranks[process]]
    finally:
        dist.destroy_process_group()
    return calls


def _local_stage(index: int, num_stages: int) -> LocalStage:
    example = torch.empty(1, 1, device="meta", requires_grad=index > 0)
    output = torch.empty(1, 1, device="meta", requires_grad=True)
    names = ("x",) if index + 1 < num_stages else ()
    return LocalStage(index=index, module=Scale(), received=(example,), outputs=(output,), output_names=names)


def equal_stages(schedule: Schedule, transfer_ns: int, random: Random | None = None) -> list[Stage]:
    """Stages whose F, I and W together take 3 ms a rank and micro-batch, or up to 30 % more or less."""
    each_ns = 1_000_000 * len(schedule.order) // schedule.num_stages

    def time_ns() -> int:
        return each_ns if random is None else int(each_ns * random.uniform(0.7, 1.3))

    last = schedule.num_stages - 1
    return [
        Stage(
            costs=(StageCost(forward_ns=time_ns(), input_grad_ns=time_ns(), weight_grad_ns=time_ns()),) * len(devices),
            send_bytes=transfer_ns if s < last else 0,
            grad_bytes=transfer_ns if s < last else 0,
        )
        for s, devices in enumerate(schedule.devices)
    ]


def predicted_ns(schedule: Schedule, stages: Sequence[Stage]) -> int:
    link = Bandwidth(bytes_per_s=10**9, latency_ns=0)  # a byte in a nanosecond
    devices = tuple(
        Device(name=f"cuda{rank}", host="h", kind="cuda", memory_bytes=1) for rank in range(len(schedule.order))
    )
    cluster = Cluster(devices=devices, intra_host=link, inter_host=link)
    return max(span.end_ns for span in simulate_schedule(schedule, stages, cluster).spans)


@pytest.mark.parametrize("name", NAMED)
def test_named_schedules_are_about_as_fast_as_predicted(name: str) -> None:
    schedule = ALL[name](8, 16)
    calls = recorded_calls(schedule, equal_stages(schedule, 0), 0)
    for transfer_ns, random in ((20_000, None), (100_000, None), (100_000, Random(1))):
        stages = equal_stages(schedule, transfer_ns, random)
        own, exact_ns = timed(calls, schedule, stages, transfer_ns), predicted_ns(schedule, stages)
        slower = SLOWER.get(name, 0.03) * transfer_ns / 100_000
        for one_queue, limit in ((False, 1 + slower), (True, 1 + 2 * slower)):
            found = step_ns(own, one_queue=one_queue)
            assert found is not None
            assert found <= limit * exact_ns


@pytest.mark.parametrize("name", NAMED)
def test_a_host_may_wait_for_its_gpu_at_any_time(name: str) -> None:
    """As when CUDA loads a kernel in the first step, and when torch's allocator is short of memory."""
    for num_ranks, num_microbatches in ((2, 2), (3, 4), (4, 8)):
        schedule = ALL[name](num_ranks, num_microbatches)
        assert gets_through_if_hosts_wait(recorded_calls(schedule, equal_stages(schedule, 0), 0))


def timed(
    calls: Sequence[Sequence[Call]], schedule: Schedule, stages: Sequence[Stage], transfer_ns: int
) -> list[list[Call]]:
    """The same calls with other times: what is called does not depend on them."""
    result = []
    for rank, own in zip(ranks_with_stage(schedule), calls, strict=True):
        actions = iter(schedule.order[rank])
        row: list[Call] = []
        for call in own:
            if isinstance(call, Compute):
                action = next(actions)
                row.append(Compute(stages[action.stage].costs[0].ns(action.phase)))
            elif isinstance(call, Post):
                row.append(Post(call.number, call.group, call.peer, call.is_send, transfer_ns))
            else:
                row.append(call)
        result.append(row)
    return result


@given(drawn(random_schedule))
@examples(15)
def test_random_schedules_do_not_deadlock(schedule: Schedule) -> None:
    stages = equal_stages(schedule, 50_000, Random(0))
    calls = recorded_calls(schedule, stages, 50_000)
    assert step_ns(calls) is not None
    assert step_ns(calls, one_queue=True) is not None
    assert gets_through_if_hosts_wait(calls)


def test_the_rules_find_a_deadlock_and_a_delay() -> None:
    send, receive = (Post(number, "", 1, number == 0, 5) for number in range(2))
    late: list[Call] = [Post(0, "", 0, False, 5), Wait(0), Compute(1), Post(1, "", 0, True, 5)]
    assert step_ns([[send, Compute(10), receive, Wait(1)], late]) == 15
    assert step_ns([[receive, Compute(10), send, Wait(1)], late]) is None  # in one queue, both ends receive first
    assert step_ns([[Wait(7)], []]) is None


def test_the_rules_find_what_one_queue_and_waiting_hosts_cannot_do() -> None:
    """A receive that is posted before a send on which it depends, through a third rank."""
    ring: list[list[Call]] = [
        [Post(0, "", 2, False, 5), Wait(0), Post(1, "", 1, True, 5)],
        [Post(0, "", 0, False, 5), Compute(1), Post(1, "", 2, True, 5), Wait(0)],
        [Post(0, "", 1, False, 5), Wait(0), Post(1, "", 0, True, 5)],
    ]
    assert step_ns(ring) == 16
    assert step_ns(ring, one_queue=True) is None
    assert not gets_through_if_hosts_wait(ring)
    ring[1] = [Compute(1), Post(1, "", 2, True, 5), Post(0, "", 0, False, 5), Wait(0)]
    assert step_ns(ring, one_queue=True) == 16
    assert gets_through_if_hosts_wait(ring)
