"""The searched order: fixed stages, and the order of F, I, W on every device that makes the judged step shortest."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bapipe.errors import InvalidSchedule
from bapipe.formats.cluster import Cluster
from bapipe.planner.action_order import cp_sat, list_scheduler
from bapipe.planner.action_order.bounds import lower_bound_ns
from bapipe.planner.action_order.evaluate import evaluate_order
from bapipe.planner.action_order.fuse_backward import fuse_backward
from bapipe.planner.action_order.local_search import threshold_accepting
from bapipe.planner.action_order.problem import (
    OrderProblem,
    Orders,
    order_problem,
    orders_of,
    relaxation,
    sequential_schedule,
)
from bapipe.schedules.table import Schedule
from bapipe.simulator.simulate import compile_for_cluster, finish_ns, simulate_schedule
from bapipe.simulator.stage_cost import Stage

_log = logging.getLogger(__name__)

CLOCKED_ACTIONS = 400_000
"""Actions timed by polishing in one unit of effort; `_JUDGED` times fewer where only the judge can tell."""
_JUDGED = 8
SOLVER_SHARE = 0.2
"""CP-SAT's deterministic time in one unit of effort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSolution:
    """The best order found, and how good it is.

    Attributes:
        schedule: None where no order fits memory.
        step_ns: its step time, by the judge; None without a schedule.
        lower_bound_ns: no legal table that fits is faster, whatever the order of its micro-batches and whether it uses
            B or I and W; None without a schedule.
    """

    schedule: Schedule | None = None
    step_ns: int | None = None
    lower_bound_ns: int | None = None

    @property
    def status(self) -> Literal["optimal", "feasible", "infeasible"]:
        """`infeasible` is a proof, and an order that fits is always found, so nothing is left unknown."""
        if self.schedule is None:
            return "infeasible"
        return "optimal" if self.step_ns == self.lower_bound_ns else "feasible"


def search_order(
    stages: Sequence[Stage],
    devices: tuple[tuple[int, ...], ...],
    cluster: Cluster,
    *,
    num_microbatches: int,
    memory_bytes: Sequence[int],
    start: Sequence[Schedule] = (),
    effort: float = 10.0,
    seed: int = 0,
    use_solver: bool = True,
) -> OrderSolution:
    """Returns the fastest order found for stages of one device each; never slower than the fastest `start` that fits.

    A list scheduler, local improvement, then CP-SAT where OR-tools is installed; without it the answer is that of the
    first two. The search stops where its bound proves the order optimal. Backwards are split while it searches, since a
    B is an I and a W that lets its gradient go late, and joined at the end where that costs no time.

    Args:
        memory_bytes: what each device of the cluster may hold.
        effort: how long to search, counted in work done and not in time, so the answer does not depend on the machine.
            A unit is about a second on one core of 2020. The same arguments give the same answer under one version of
            OR-tools, or none.
        use_solver: whether CP-SAT runs after the local search, if OR-tools is installed.

    Raises:
        ValueError: a stage with several devices, or a start with other devices or micro-batches.
    """
    problem = order_problem(stages, devices, cluster, num_microbatches, memory_bytes)
    search = _Search(problem, stages, devices, cluster, memory_bytes)
    for schedule in start:
        if schedule.devices != devices or schedule.num_microbatches != num_microbatches:
            raise ValueError(
                f"a start with devices {schedule.devices} and {schedule.num_microbatches} micro-batches; "
                f"want {devices} and {num_microbatches}"
            )
        search.offer(schedule)
    in_turn = sequential_schedule(devices, num_microbatches, problem.num_ranks)
    search.offer(in_turn)
    if search.schedule is None:
        return OrderSolution()
    easier = relaxation(problem, stages)
    search.bound_ns, search.bounded_by_solver = lower_bound_ns(easier), easier == problem
    if problem.fits(orders_of(in_turn)):  # else I leaves more than there is room for, and only B fits
        search.run([orders_of(schedule) for schedule in start], effort, seed, use_solver)
    return OrderSolution(schedule=search.schedule, step_ns=search.step_ns, lower_bound_ns=search.bound_ns)


class _Search:
    """The best table so far and the bound so far."""

    def __init__(
        self,
        problem: OrderProblem,
        stages: Sequence[Stage],
        devices: tuple[tuple[int, ...], ...],
        cluster: Cluster,
        memory_bytes: Sequence[int],
    ) -> None:
        self.problem, self.stages, self.devices, self.cluster = problem, stages, devices, cluster
        self.memory_bytes = memory_bytes
        self.monotone = problem.monotone
        self.schedule: Schedule | None = None
        self.step_ns = 0
        self.bound_ns = 0
        self.bounded_by_solver = True

    def offer(self, schedule: Schedule, or_equal: bool = False) -> None:
        """Keeps a table that fits and is faster, or as fast where that is enough."""
        timeline = simulate_schedule(schedule, self.stages, self.cluster)
        fits = all(held.total <= most for held, most in zip(timeline.memory, self.memory_bytes, strict=True))
        if fits and (self.schedule is None or timeline.step_ns < self.step_ns + or_equal):
            self.schedule, self.step_ns = schedule, timeline.step_ns

    def time(self, orders: Orders) -> int | None:
        """Returns the step time by the judge's rules, None where the order deadlocks."""
        if self.monotone:
            timed = evaluate_order(self.problem, orders)
            return timed[1] if timed else None
        try:
            table = self.problem.table(self.devices, orders)
            program = compile_for_cluster(table, self.cluster)
        except InvalidSchedule:
            return None
        done = finish_ns(program, self.stages, self.cluster)
        return max(ns + update_ns for ns, update_ns in zip(done, self.problem.update_ns, strict=True))

    @property
    def proven(self) -> bool:
        return self.step_ns <= self.bound_ns

    def run(self, start: Sequence[Orders], effort: float, seed: int, use_solver: bool) -> None:
        if self.proven:
            return
        best = self.construct(start)
        best = self.improve(best, effort, seed)
        if not self.proven and use_solver and cp_sat.is_installed():
            best = self.solve(best, effort, seed)
        assert self.schedule is not None
        self.offer(fuse_backward(self.schedule, self.stages, self.cluster), or_equal=True)

    def construct(self, start: Sequence[Orders]) -> Orders:
        """Returns the fastest of the list scheduler's orders and those started from."""
        best, best_ns = None, None
        for orders in start:
            if (
                self.problem.fits(orders)
                and (ns := self.time(orders)) is not None
                and (best_ns is None or ns < best_ns)
            ):
                best, best_ns = orders, ns
        for rule in list_scheduler.rules(self.problem):
            orders = list_scheduler.schedule(self.problem, rule)
            if (ns := self.time(orders)) is not None and (best_ns is None or ns < best_ns):
                best, best_ns = orders, ns
            if best_ns == self.bound_ns:
                break
        assert best is not None
        self.offer(self.problem.table(self.devices, best))
        _log.info("list scheduler: step %d ns, bound %d ns", self.step_ns, self.bound_ns)
        return best

    def improve(self, orders: Orders, effort: float, seed: int) -> Orders:
        if self.proven:
            return orders
        actions = effort * CLOCKED_ACTIONS / (1 if self.monotone else _JUDGED)
        num_trials = int(actions / self.problem.num_actions)
        best = threshold_accepting(
            self.problem, orders, self.time, goal_ns=self.bound_ns, num_trials=num_trials, seed=seed
        )
        self.offer(self.problem.table(self.devices, best))
        _log.info("polished: step %d ns, bound %d ns", self.step_ns, self.bound_ns)
        return best

    def solve(self, orders: Orders, effort: float, seed: int) -> Orders:
        answer = cp_sat.solve(self.problem, orders, below_ns=self.step_ns, effort=SOLVER_SHARE * effort, seed=seed)
        if self.bounded_by_solver:  # the solver knows I and W, not a B that is shorter
            self.bound_ns = max(self.bound_ns, answer.lower_bound_ns)
        if answer.orders is None or not self.problem.fits(answer.orders) or self.time(answer.orders) is None:
            return orders
        self.offer(self.problem.table(self.devices, answer.orders))
        _log.info("CP-SAT: step %d ns, bound %d ns", self.step_ns, self.bound_ns)
        return answer.orders
