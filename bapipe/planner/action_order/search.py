"""Searches the order of F, I and W on every device that minimizes the simulated step, for fixed stages.

List scheduling gives a start, threshold accepting improves it, CP-SAT improves it further and raises the lower bound;
the search stops as soon as the bound proves the order optimal.
"""

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
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.schedules.table import Schedule
from bapipe.simulator.simulate import compile_for_cluster, finish_ns, simulate_columns
from bapipe.simulator.stage import Stage

_log = logging.getLogger(__name__)

ACTIONS_PER_EFFORT = 400_000
"""Actions that threshold accepting evaluates in one unit of effort, if `evaluate_order` can evaluate them."""

SIMULATION_COST = 8
"""Time per action in the simulator, relative to `evaluate_order`."""

SOLVER_TIME_PER_EFFORT = 0.2
"""CP-SAT's deterministic time in one unit of effort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSolution:
    """The best order found, and a lower bound on all orders.

    Attributes:
        schedule: None if no order fits memory.
        step_ns: its simulated step time; None without a schedule.
        lower_bound_ns: no legal table that fits is faster, whatever the order of its micro-batches and whether it uses
            B or I and W; None without a schedule.
    """

    schedule: Schedule | None = None
    step_ns: int | None = None
    lower_bound_ns: int | None = None

    @property
    def status(self) -> Literal["optimal", "feasible", "infeasible"]:
        """`infeasible` is a proof: if an order fits, one is always found."""
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
    deadline: Deadline = UNLIMITED,
) -> OrderSolution:
    """Returns the fastest order found for stages of one device each; never slower than the fastest `start` that fits.

    Backwards are split during the search, because a B is an I and a W whose gradient is sent late, and fused again at
    the end if that costs no time. Without OR-tools the solution is that of list scheduling and threshold accepting.

    Args:
        memory_bytes: the memory that each device of the cluster may use.
        effort: how long to search, in work and not in time, so the solution does not depend on the machine. A unit
            takes about a second on one core of 2020. The same arguments give the same solution with one version of
            OR-tools, or without it.
        use_solver: whether CP-SAT runs after the local search, if OR-tools is installed.
        deadline: ends the search with the best order so far.

    Raises:
        ValueError: a stage with several devices, or a start with other devices or micro-batches.
    """
    problem = order_problem(stages, devices, cluster, num_microbatches, memory_bytes)
    search = _Search(problem, stages, devices, cluster, memory_bytes, deadline)
    for schedule in start:
        if schedule.devices != devices or schedule.num_microbatches != num_microbatches:
            raise ValueError(
                f"a start with devices {schedule.devices} and {schedule.num_microbatches} micro-batches; "
                f"want {devices} and {num_microbatches}"
            )
        search.try_incumbent(schedule)
        if search.schedule is not None and deadline.is_over:
            return OrderSolution(schedule=search.schedule, step_ns=search.step_ns, lower_bound_ns=0)
    sequential = sequential_schedule(devices, num_microbatches, problem.num_ranks)
    search.try_incumbent(sequential)
    if search.schedule is None:  # no table needs less memory than the sequential one
        return OrderSolution()
    search.bound_ns = lower_bound_ns(problem, stages)
    search.solver_bound_holds = relaxation(problem, stages) == problem
    if problem.fits(orders_of(sequential)):  # else what I leaves for W does not fit, and only tables with B do
        search.run([orders_of(schedule) for schedule in start], effort, seed, use_solver)
    return OrderSolution(schedule=search.schedule, step_ns=search.step_ns, lower_bound_ns=search.bound_ns)


class _Search:
    """The incumbent and the lower bound."""

    def __init__(
        self,
        problem: OrderProblem,
        stages: Sequence[Stage],
        devices: tuple[tuple[int, ...], ...],
        cluster: Cluster,
        memory_bytes: Sequence[int],
        deadline: Deadline,
    ) -> None:
        self.problem, self.stages, self.devices, self.cluster = problem, stages, devices, cluster
        self.memory_bytes, self.deadline = memory_bytes, deadline
        self.is_monotone = problem.is_monotone
        self.schedule: Schedule | None = None
        self.step_ns = 0
        self.bound_ns = 0
        self.solver_bound_holds = True

    def try_incumbent(self, schedule: Schedule, or_equal: bool = False) -> None:
        """Keeps a table that fits in memory and is faster than the incumbent, or as fast if `or_equal`."""
        timeline = simulate_columns(schedule, self.stages, self.cluster)
        fits = all(peak.total <= limit for peak, limit in zip(timeline.memory, self.memory_bytes, strict=True))
        if fits and (self.schedule is None or timeline.step_ns < self.step_ns + or_equal):
            self.schedule, self.step_ns = schedule, timeline.step_ns

    def step_time(self, orders: Orders) -> int | None:
        """Returns the simulated step time, None if the order deadlocks."""
        if self.is_monotone:
            timing = evaluate_order(self.problem, orders)
            return timing.step_ns if timing else None
        try:
            table = self.problem.table(self.devices, orders)
            compiled = compile_for_cluster(table, self.cluster)
        except InvalidSchedule:
            return None
        done = finish_ns(compiled, self.stages, self.cluster)
        return max(ns + update_ns for ns, update_ns in zip(done, self.problem.update_ns, strict=True))

    @property
    def is_done(self) -> bool:
        """Whether the incumbent attains the lower bound, or the deadline has passed."""
        return self.step_ns <= self.bound_ns or self.deadline.is_over

    def run(self, start: Sequence[Orders], effort: float, seed: int, use_solver: bool) -> None:
        """Runs list scheduling, threshold accepting and CP-SAT, until the incumbent is proven optimal."""
        if self.is_done:
            return
        best = self.construct(start)
        best = self.improve(best, effort, seed)
        if not self.is_done and use_solver and cp_sat.is_installed():
            best = self.solve(best, effort, seed)
        assert self.schedule is not None
        fused = fuse_backward(self.schedule, self.stages, self.cluster, self.deadline)
        if fused is not self.schedule:
            self.try_incumbent(fused, or_equal=True)

    def construct(self, start: Sequence[Orders]) -> Orders:
        """Returns the fastest of the list scheduler's orders and the given ones."""
        # Evaluate the named schedules first: a list schedule must beat them.
        best, best_ns = None, None
        for orders in start:
            if best is not None and self.deadline.is_over:
                break
            if (
                self.problem.fits(orders)
                and (ns := self.step_time(orders)) is not None
                and (best_ns is None or ns < best_ns)
            ):
                best, best_ns = orders, ns
        for rule in list_scheduler.priority_rules(self.problem):
            orders = list_scheduler.list_schedule(self.problem, rule)
            if (ns := self.step_time(orders)) is not None and (best_ns is None or ns < best_ns):
                best, best_ns = orders, ns
            if best_ns == self.bound_ns or (best is not None and self.deadline.is_over):
                break
        assert best is not None
        self.try_incumbent(self.problem.table(self.devices, best))
        _log.info("list scheduler: step %d ns, bound %d ns", self.step_ns, self.bound_ns)
        return best

    def improve(self, orders: Orders, effort: float, seed: int) -> Orders:
        """Returns the best order of threshold accepting from a given one."""
        if self.is_done:
            return orders
        num_actions = effort * ACTIONS_PER_EFFORT / (1 if self.is_monotone else SIMULATION_COST)
        num_trials = int(num_actions / self.problem.num_actions)
        best = threshold_accepting(
            self.problem,
            orders,
            self.step_time,
            goal_ns=self.bound_ns,
            num_trials=num_trials,
            seed=seed,
            deadline=self.deadline,
        )
        self.try_incumbent(self.problem.table(self.devices, best))
        _log.info("threshold accepting: step %d ns, bound %d ns", self.step_ns, self.bound_ns)
        return best

    def solve(self, orders: Orders, effort: float, seed: int) -> Orders:
        """Returns CP-SAT's order if it is faster, and raises the lower bound."""
        answer = cp_sat.solve(
            self.problem,
            orders,
            below_ns=self.step_ns,
            effort=SOLVER_TIME_PER_EFFORT * effort,
            seed=seed,
            deadline=self.deadline,
        )
        if self.solver_bound_holds:  # the model has I and W only: its bound does not hold if a B is shorter than I + W
            self.bound_ns = max(self.bound_ns, answer.lower_bound_ns)
        # Rounded memory may admit an order that does not fit, and transfers that may overtake one that deadlocks.
        if answer.orders is None or not self.problem.fits(answer.orders) or self.step_time(answer.orders) is None:
            return orders
        self.try_incumbent(self.problem.table(self.devices, answer.orders))
        _log.info("CP-SAT: step %d ns, bound %d ns", self.step_ns, self.bound_ns)
        return answer.orders
