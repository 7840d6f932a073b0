"""A lower bound on the step time of every order, computed without a solver.

*Heads*: the earliest time at which the k-th F, I and W of every stage can end. They follow from four rules:

    chain    an action ends after the action that feeds it, the transfer between them, and itself; and the k-th action
             of a phase ends after the one before it
    work     between an earlier begin and this end, the stage must run every action that belongs between them
    memory   if at most K micro-batches of a stage fit, the F of micro-batch k + K begins after the end of the W of k
    link     a transfer begins after the transfer before it on its link has ended

*Tails*: the same for the step run backwards in time, with W, I, F in the roles of F, I, W: at least this much of the
step follows the end of an action.

*One machine*: every device, and every link, runs one job at a time, each with a head and a tail. The length of its
optimal preemptive schedule is a lower bound on the step (Jackson 1955; Carlier 1982, "The one-machine sequencing
problem"); the result is the largest over all machines.

The bound holds for every legal table that fits in memory: by the renaming lemma in `problem.py` the k-th micro-batch of
a stage may stand for any, and each rule above is one that the simulator keeps. A table with B may be faster, and need
less memory, than every order of I and W, so `lower_bound_ns` is computed for the relaxation.
docs/action_orders.md has the proofs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from bapipe.planner.action_order.problem import F, I, OrderProblem, W, relaxation
from bapipe.simulator.stage import Stage

Ends = list[list[list[int]]]
"""Earliest ends in nanoseconds, by stage, part (0, 1, 2 in the order they run) and k; [stages][3][micro-batches]."""


@dataclass(frozen=True, slots=True)
class Job:
    """One action on a machine: it begins at `head_ns` or later, and `tail_ns` of the step follow its end."""

    head_ns: int
    ns: int
    tail_ns: int


def lower_bound_ns(problem: OrderProblem, stages: Sequence[Stage]) -> int:
    """Returns a time that no legal table of the problem's stages that fits beats, with B or with I and W.

    Some table must fit. O(n log n) for n actions.
    """
    return split_lower_bound_ns(relaxation(problem, stages))


def split_lower_bound_ns(problem: OrderProblem) -> int:
    """Returns a time that no order that fits beats; a table with B may. Some order must fit."""
    heads, tails = heads_and_tails(problem)
    return max((preemptive_one_machine_ns(jobs) for jobs in _machines(problem, heads, tails)), default=0)


def heads_and_tails(problem: OrderProblem) -> tuple[Ends, Ends]:
    """Returns the earliest ends forwards in time, parts F, I, W, and backwards in time, parts W, I, F.

    Some order must fit.
    """
    heads = _earliest_ends(problem, [(F, -1), (I, 1), (W, 0)], [0] * problem.num_stages)
    tails = _earliest_ends(problem, [(W, 0), (I, -1), (F, 1)], [problem.update_ns[rank] for rank in problem.rank_of])
    return heads, tails


def preemptive_one_machine_ns(jobs: Sequence[Job]) -> int:
    """Returns the minimal length of a schedule that may interrupt jobs: max over jobs of end + tail.

    Jackson's rule is optimal: among the jobs that have been released, always run the one with the longest tail.
    O(n log n).
    """
    released: list[list[int]] = []  # a heap of [-tail, remaining time]
    now = length = 0
    by_head = sorted(jobs, key=lambda job: job.head_ns)
    num_released = 0
    while num_released < len(by_head) or released:
        if not released:  # idle until the next release
            now = max(now, by_head[num_released].head_ns)
        while num_released < len(by_head) and by_head[num_released].head_ns <= now:
            job = by_head[num_released]
            heappush(released, [-job.tail_ns, job.ns])
            num_released += 1
        # Run the most urgent job until it ends or the next release, which may be more urgent.
        until = by_head[num_released].head_ns if num_released < len(by_head) else now + released[0][1]
        run = min(released[0][1], until - now)
        now += run
        released[0][1] -= run
        if released[0][1] == 0:
            length = max(length, now - heappop(released)[0])
    return length


def _machines(problem: OrderProblem, heads: Ends, tails: Ends) -> list[list[Job]]:
    """Returns the jobs of every link and every device; a device that does not overlap transfers runs those too."""
    on_rank: list[list[Job]] = [[] for _ in range(problem.num_ranks)]
    num, last = problem.num_microbatches, problem.num_stages - 1
    machines = []
    for s, rank in enumerate(problem.rank_of):
        for phase in (F, I, W):
            ns = problem.action_ns[3 * s + phase]
            for k in range(num):
                # Backwards in time the phases are numbered from W, and the micro-batches from the last.
                tail_ns = tails[s][2 - phase][num - 1 - k] - ns
                on_rank[rank].append(Job(heads[s][phase][k] - ns, ns, tail_ns))
    for link, kinds in problem.links().items():
        jobs = []
        for s, is_forward in kinds:
            phase, to = (F, s + 1) if is_forward else (I, s - 1)
            assert 0 <= to <= last
            # A transfer is released when its sender's action ends; its tail is that of the action it feeds.
            ns = problem.send_ns[s] if is_forward else problem.return_ns[to]
            jobs += [Job(heads[s][phase][k], ns, tails[to][2 - phase][num - 1 - k]) for k in range(num)]
        machines.append(jobs)
        for rank in link:
            if not problem.overlaps_transfers[rank]:
                on_rank[rank] += jobs
    return [*machines, *on_rank]


def _earliest_ends(problem: OrderProblem, parts: Sequence[tuple[int, int]], begin_ns: Sequence[int]) -> Ends:
    """Returns the earliest ends, forwards or backwards in time.

    `parts` are (phase, step) in the order in which a micro-batch runs them on a stage s; the input of a part comes from
    the same phase of stage s + step, or from nowhere if the step is 0. Nothing of stage s begins before `begin_ns[s]`.
    """
    stages = range(problem.num_stages)
    is_alone = [len(problem.stages_on(rank)) == 1 for rank in problem.rank_of]
    rows = [
        _StageEnds(
            [problem.action_ns[3 * s + phase] for phase, _ in parts],
            # Stages that share a device share its memory, so their number in flight alone bounds nothing.
            problem.max_in_flight(s) if is_alone[s] else problem.num_microbatches,
        )
        for s in stages
    ]
    arrived: dict[tuple[int, int], int] = {}  # when the latest transfer to a stage and part ended
    for k in range(problem.num_microbatches):
        for part, (phase, step) in enumerate(parts):
            # Along the pipeline, so that the stage that sends comes before the one that receives.
            for s in stages if step < 0 else reversed(stages):
                ready_ns = begin_ns[s]
                if step and 0 <= s + step < problem.num_stages:
                    transfer_ns = (problem.send_ns if phase == F else problem.return_ns)[min(s, s + step)]
                    ready_ns = max(rows[s + step].ends[part][k], arrived.get((s, part), 0)) + transfer_ns  # link
                    arrived[s, part] = ready_ns if transfer_ns else 0
                rows[s].add(part, ready_ns)
    return [row.ends for row in rows]


class _StageEnds:
    """The earliest begins and ends of one stage, for the micro-batches so far; [3][micro-batches]."""

    def __init__(self, part_ns: Sequence[int], max_in_flight: int) -> None:
        assert max_in_flight > 0, "no order fits"
        self.part_ns, self.max_in_flight = part_ns, max_in_flight
        self.begins: list[list[int]] = [[], [], []]
        self.ends: list[list[int]] = [[], [], []]
        self._work_bounds = _work_bounds(part_ns, max_in_flight)

    def add(self, part: int, ready_ns: int) -> None:
        """Adds the next micro-batch of a part whose input arrives at `ready_ns`."""
        k = len(self.ends[part])
        if part:  # chain: the part before, of the same micro-batch
            ready_ns = max(ready_ns, self.ends[part - 1][k])
        elif k >= self.max_in_flight:  # memory
            ready_ns = max(ready_ns, self.ends[2][k - self.max_in_flight])
        if k:  # chain: the same part, of the micro-batch before
            ready_ns = max(ready_ns, self.ends[part][-1])
        # The begin is not raised by the work bound: it may have to wait after it could begin.
        self.begins[part].append(ready_ns)
        work_ns = max(bound.earliest_end_ns(self.begins[bound.part], k) for bound in self._work_bounds[part])
        self.ends[part].append(max(ready_ns + self.part_ns[part], work_ns))


def _work_bounds(part_ns: Sequence[int], max_in_flight: int) -> list[list["_WorkBound"]]:
    """Returns what bounds the ends of each part by work: what the stage must do between a begin and that end.

    After part 0 of micro-batch i begins, and before part p of k ends, the stage runs part 0 of i..k, and if p > 0
    part 1 of i..k, and so on: n = k - i + 1 of each. Memory adds work: if n exceeds the K that fit by `freed`, that
    many micro-batches from i on have finished all parts before part 0 of k, and as many begin only after part 2 of
    i. With part times a, b, c, and i over all micro-batches up to k:

        from part 0 of i:  begin + n (a + .. of the parts up to p) + freed (.. of the parts after p)
        from part 1 of i:  begin + n b      + freed (a + c)   if p = 1;   begin + freed (a + b + c)  if p = 0
        from part 1 of i:  begin + n (b + c) + freed a        if p = 2

    Each is the larger one of two lines in n: without `freed`, and from n = K on with it.
    """
    a, b, c = part_ns
    full, whole = max_in_flight, a + b + c
    return [
        [
            _WorkBound(0, a, 0, 0),
            _WorkBound(0, whole, full, full * (b + c)),
            _WorkBound(1, whole, full, full * whole),
        ],
        [
            _WorkBound(0, a + b, 0, 0),
            _WorkBound(0, whole, full, full * c),
            _WorkBound(1, b, 0, 0),
            _WorkBound(1, whole, full, full * (a + c)),
        ],
        [
            _WorkBound(0, whole, 0, 0),
            _WorkBound(1, b + c, 0, 0),
            _WorkBound(1, whole, full, full * a),
        ],
    ]


class _WorkBound:
    """The largest of begin of i + n * `each_ns` - `less_ns`, over the micro-batches i up to k - `lag`; n = k - i + 1.

    Attributes:
        part: whose begins these are.
    """

    __slots__ = ("_latest_ns", "each_ns", "lag", "less_ns", "part")

    def __init__(self, part: int, each_ns: int, lag: int, less_ns: int) -> None:
        self.part, self.each_ns, self.lag, self.less_ns = part, each_ns, lag, less_ns
        self._latest_ns = 0  # of begin - i * each_ns

    def earliest_end_ns(self, begins: Sequence[int], k: int) -> int:
        """Returns it for the next k, 0 as long as there is no such i."""
        i = k - self.lag
        if i < 0:
            return 0
        latest_ns = begins[i] - i * self.each_ns
        self._latest_ns = latest_ns if i == 0 else max(self._latest_ns, latest_ns)
        return self._latest_ns + (k + 1) * self.each_ns - self.less_ns
