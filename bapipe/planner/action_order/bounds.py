"""A lower bound on the step time of every order, without a solver.

Heads first: the least time at which the k-th F, I and W of every stage can end. They follow from one another through
the transfers, through the work that the stage must have done by then, and through memory: a stage that can keep K
micro-batches begins the F of k + K after the W of k. Tails are the heads of the step run backwards in time, where W, I,
F take the parts of F, I, W. Then every device, and every link, is one machine: jobs with heads and tails, one at a
time. The bound is the length of the best schedule of that machine that may interrupt jobs (Jackson 1955; Carlier 1982,
"The one-machine sequencing problem"), the largest over all machines.

It holds for every legal table that fits: the head of `order_problem.py` shows why the k-th micro-batch may stand for
any, and every rule used here is one that the judge keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from bapipe.planner.action_order.problem import F, I, OrderProblem, W

Ends = list[list[list[int]]]
"""Least end by stage, part (0, 1, 2 in the order they run) and k."""


@dataclass(frozen=True, slots=True)
class Job:
    """What occupies a machine: it can begin at `head_ns`, and `tail_ns` of the step follow its end."""

    head_ns: int
    ns: int
    tail_ns: int


def lower_bound_ns(problem: OrderProblem) -> int:
    """Returns a time that no legal table that fits beats. O(stages * num_microbatches**2)."""
    heads, tails = heads_and_tails(problem)
    return max((preemptive_one_machine_ns(jobs) for jobs in _machines(problem, heads, tails)), default=0)


def heads_and_tails(problem: OrderProblem) -> tuple[Ends, Ends]:
    """Returns the least ends forwards in time, parts F, I, W, and backwards in time, parts W, I, F."""
    heads = _ends(problem, [(F, -1), (I, 1), (W, 0)], [0] * problem.num_stages)
    tails = _ends(problem, [(W, 0), (I, -1), (F, 1)], [problem.update_ns[rank] for rank in problem.rank_of])
    return heads, tails


def preemptive_one_machine_ns(jobs: Sequence[Job]) -> int:
    """Returns the least time for jobs that may be interrupted: always run the one of the longest tail."""
    ready: list[list[int]] = []  # [-tail, what is left]
    now = longest = 0
    rest = sorted(jobs, key=lambda job: job.head_ns)
    place = 0
    while place < len(rest) or ready:
        if not ready:
            now = max(now, rest[place].head_ns)
        while place < len(rest) and rest[place].head_ns <= now:
            heappush(ready, [-rest[place].tail_ns, rest[place].ns])
            place += 1
        until = rest[place].head_ns if place < len(rest) else now + ready[0][1]
        run = min(ready[0][1], until - now)
        now += run
        ready[0][1] -= run
        if ready[0][1] == 0:
            longest = max(longest, now - heappop(ready)[0])
    return longest


def _machines(problem: OrderProblem, heads: Ends, tails: Ends) -> list[list[Job]]:
    on_rank: list[list[Job]] = [[] for _ in range(problem.num_ranks)]
    num, last = problem.num_microbatches, problem.num_stages - 1
    machines = []
    for s, rank in enumerate(problem.rank_of):
        for phase in (F, I, W):
            ns = problem.ns[3 * s + phase]
            for k in range(num):
                tail_ns = tails[s][2 - phase][num - 1 - k] - ns
                on_rank[rank].append(Job(heads[s][phase][k] - ns, ns, tail_ns))
    for link, kinds in problem.links().items():
        jobs = []
        for s, forward in kinds:
            phase, to = (F, s + 1) if forward else (I, s - 1)
            assert 0 <= to <= last
            ns = problem.send_ns[s] if forward else problem.return_ns[to]
            jobs += [Job(heads[s][phase][k], ns, tails[to][2 - phase][num - 1 - k]) for k in range(num)]
        machines.append(jobs)
        for rank in link:
            if not problem.overlaps[rank]:
                on_rank[rank] += jobs
    return [*machines, *on_rank]


def _ends(problem: OrderProblem, parts: Sequence[tuple[int, int]], begin_ns: Sequence[int]) -> Ends:
    """Returns the least ends, forwards or backwards in time.

    `parts` are (phase, step) in the order in which a micro-batch runs them on a stage s; the input of a part comes from
    the same phase of stage s + step, or from nowhere where the step is 0. Nothing of stage s begins before
    `begin_ns[s]`.
    """
    stages = range(problem.num_stages)
    alone = [len(problem.stages_on(rank)) == 1 for rank in problem.rank_of]
    rows = [
        _Row(
            [problem.ns[3 * s + phase] for phase, _ in parts],
            problem.depth(s) if alone[s] else problem.num_microbatches,
        )
        for s in stages
    ]
    arrived: dict[tuple[int, int], int] = {}
    for k in range(problem.num_microbatches):
        for part, (phase, step) in enumerate(parts):
            for s in stages if step < 0 else reversed(stages):
                ready_ns = begin_ns[s]
                if step and 0 <= s + step < problem.num_stages:
                    transfer_ns = (problem.send_ns if phase == F else problem.return_ns)[min(s, s + step)]
                    ready_ns = max(rows[s + step].ends[part][k], arrived.get((s, part), 0)) + transfer_ns
                    arrived[s, part] = ready_ns if transfer_ns else 0
                rows[s].add(part, ready_ns)
    return [row.ends for row in rows]


class _Row:
    """The least begins and ends of one stage, for the micro-batches so far."""

    def __init__(self, ns: Sequence[int], depth: int) -> None:
        self.ns, self.depth = ns, depth
        self.begins: list[list[int]] = [[], [], []]
        self.ends: list[list[int]] = [[], [], []]

    def add(self, part: int, ready_ns: int) -> None:
        """Adds the next micro-batch of a part whose input is there at `ready_ns`."""
        k = len(self.ends[part])
        if part:
            ready_ns = max(ready_ns, self.ends[part - 1][k])
        elif k >= self.depth:
            ready_ns = max(ready_ns, self.ends[2][k - self.depth])
        if k:
            ready_ns = max(ready_ns, self.ends[part][-1])
        self.begins[part].append(ready_ns)
        self.ends[part].append(max(ready_ns + self.ns[part], self.by_work(part, k)))

    def by_work(self, part: int, k: int) -> int:
        """The least end of the k-th of a part, from what the stage must do between an earlier begin and that end.

        After part 0 of i begins: part 0 of i..k, and part 1 likewise if `part` > 0, and so on. Memory adds what must
        make room: `freed` micro-batches from i on are all done before part 0 of k, and as many begin only after part 2
        of i.
        """
        a, b, c = self.ns
        least = 0
        for i in range(k + 1):
            num, freed = k - i + 1, max(0, k - i + 1 - self.depth)
            first = self.begins[0][i] + num * sum(self.ns[: part + 1]) + freed * sum(self.ns[part + 1 :])
            least = max(least, first)
            if part == 0 and freed:
                least = max(least, self.begins[1][i] + freed * (a + b + c))
            elif part == 1:
                least = max(least, self.begins[1][i] + num * b + freed * (a + c))
            elif part == 2:
                least = max(least, self.begins[1][i] + num * (b + c) + freed * a)
        return least
