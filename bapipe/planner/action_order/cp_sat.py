"""The action order problem as a constraint model for CP-SAT (OR-tools), for better orders and especially better bounds.

A job-shop model: an interval variable per action and per transfer that can wait, no overlap on a device or link,
precedences along the pipeline, and a cumulative constraint for memory.

*A relaxation.* The model keeps the simulator's rules except that it drops the no-idling rule: transfers may overtake
one another, and anything may wait. Every legal table that fits is a solution with the same step time or less (the
renaming lemma in `problem.py` gives micro-batches in ascending order), so the solver's bound holds for all of them. In
a monotone problem the simulator attains the step time of every solution.

*Rounded times.* Times are divided by `unit` and rounded down. The bound remains valid: keep the order of a real
timeline and start everything as early as the rounded times allow. The longest path of rounded times is no longer than
that of the divided times, so the rounded step is at most step / unit. A rounded problem is an order problem like any
other, so heads, tails and the evaluation of the hint are those of `bounds.py` and `evaluate.py`.

*Backwards of no length.* What an action holds in memory counts only if it has a length. If a stage has a backward of
no time, a unit is split into more parts than there are actions, and every action of no length has one part: all
together stay below a unit, so the step in units, rounded down, is as before.
"""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import floor, gcd
from typing import TYPE_CHECKING

from bapipe.planner.action_order.bounds import heads_and_tails
from bapipe.planner.action_order.evaluate import evaluate_order
from bapipe.planner.action_order.problem import F, I, OrderProblem, Orders, W
from bapipe.planner.compute.deadline import UNLIMITED, Deadline

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MAX_UNITS = 2**40
"""The longest step in the model's units of time; for a longer step the unit is larger."""
MAX_MEMORY_UNITS = 2**16
"""The memory of a device in the model's units; rounding down makes the limit looser, so the model is a relaxation."""

POLL_S = 0.05
"""Between two looks at the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """The solver's orders, None if it found none that is faster, and a lower bound on every legal table that fits."""

    orders: Orders | None
    lower_bound_ns: int


def is_installed() -> bool:
    """Whether OR-tools can be imported."""
    return find_spec("ortools") is not None


def solve(
    problem: OrderProblem,
    hint: Orders,
    *,
    below_ns: int,
    effort: float,
    seed: int,
    deadline: Deadline = UNLIMITED,
    max_units: int = MAX_UNITS,
) -> SolverResult:
    """Returns orders whose step takes less than `below_ns` in the model, and a lower bound.

    Stops after `effort` units of the solver's deterministic time. One thread and a fixed seed, so the result depends
    only on the arguments and on the version of OR-tools.

    Args:
        hint: an order that the solver starts from.
        deadline: when it stops in any case.
        max_units: see `MAX_UNITS`.
    """
    from ortools.sat.python import cp_model

    # Scale the times, so that the solver's domains stay small.
    unit = _unit(problem, below_ns, max_units)
    parts = _parts(problem)
    rounded = _rounded(problem, unit, parts)
    # Only a step strictly below the incumbent is of interest.
    model = _Model(rounded, (below_ns - 1) // unit * parts + parts - 1)
    model.build(hint)
    solver = cp_model.CpSolver()
    # One worker, a seed and deterministic time: the same result on every machine.
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = _solve_until(deadline, solver, model.cp)
    if status == cp_model.INFEASIBLE:
        # No order is faster than the incumbent: the incumbent is optimal in the model.
        return SolverResult(orders=None, lower_bound_ns=below_ns)
    assert status != cp_model.MODEL_INVALID, model.cp.validate()
    has_solution = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    # The bound is an integer of at most 40 bits as a float, up to a tiny error.
    bound_ns = floor(solver.best_objective_bound + 1e-6) // parts * unit
    return SolverResult(orders=model.orders(solver) if has_solution else None, lower_bound_ns=max(0, bound_ns))


def _solve_until(
    deadline: Deadline, solver: "cp_model.CpSolver", model: "cp_model.CpModel"
) -> "cp_model.CpSolverStatus":
    """Solves a model in another thread, so that Ctrl-C reaches this one, and returns the status."""
    # With a handler of its own OR-tools would take the first Ctrl-C, and let every later one end this process at once.
    solver.parameters.catch_sigint_signal = False
    left_s = deadline.remaining_s
    if left_s is not None:
        solver.parameters.max_time_in_seconds = left_s

    def solve() -> tuple["cp_model.CpSolverStatus", float]:
        started_s = time.thread_time()
        return solver.solve(model), time.thread_time() - started_s

    with ThreadPoolExecutor(1) as pool:
        solving = pool.submit(solve)
        try:
            while not solving.done() and not deadline.is_over:
                wait([solving], POLL_S)
        finally:
            while not solving.done():
                solver.stop_search()
                wait([solving], POLL_S)
    status, computed_s = solving.result()
    deadline.count(computed_s)
    return status


def _unit(problem: OrderProblem, below_ns: int, max_units: int) -> int:
    """Returns the largest unit that divides all times, or one that keeps the step within `max_units`."""
    # Dividing by a common divisor loses nothing.
    exact = gcd(*problem.action_ns, *problem.send_ns, *problem.return_ns, *problem.update_ns) or 1
    return exact if below_ns // exact <= max_units else -(-below_ns // max_units)


def _parts(problem: OrderProblem) -> int:
    """Returns into how many parts a unit is split."""
    backwards = zip(problem.action_ns[I::3], problem.action_ns[W::3], strict=True)
    return 1 if all(map(any, backwards)) else problem.num_actions + 1


def _rounded(problem: OrderProblem, unit: int, parts: int) -> OrderProblem:
    shortest = 1 if parts > 1 else 0
    return replace(
        problem,
        action_ns=tuple(ns // unit * parts or shortest for ns in problem.action_ns),
        send_ns=tuple(ns // unit * parts for ns in problem.send_ns),
        return_ns=tuple(ns // unit * parts for ns in problem.return_ns),
        update_ns=tuple(ns // unit * parts for ns in problem.update_ns),
    )


class _Model:
    """The variables and constraints of the model, and the order that a solution gives."""

    def __init__(self, problem: OrderProblem, max_step: int) -> None:
        """`max_step` is the longest step of interest, in units."""
        from ortools.sat.python import cp_model

        self.problem, self.max_step = problem, max_step
        self.cp = cp_model.CpModel()
        self.step = self.cp.new_int_var(0, max_step, "step")
        self.begins: list[list[cp_model.IntVar]] = []  # [3 * stages][micro-batches]
        self.machines: dict[object, list[cp_model.IntervalVar]] = {}  # by rank or link: intervals that must not overlap

    def build(self, hint: Orders) -> None:
        self.add_actions(hint)
        self.add_transfers()
        self.add_memory()
        for intervals in self.machines.values():
            self.cp.add_no_overlap(intervals)
        for s, rank in enumerate(self.problem.rank_of):
            self.cp.add(self.step >= self.end(3 * s + W, -1) + self.problem.update_ns[rank])
        self.cp.minimize(self.step)

    def end(self, code: int, k: int) -> "cp_model.LinearExpr":
        return self.begins[code][k] + self.problem.action_ns[code]

    def add_actions(self, hint: Orders) -> None:
        """Adds every action between its head and its tail, micro-batches ascending, F before I before W."""
        problem = self.problem
        heads, tails = heads_and_tails(problem)
        hinted = evaluate_order(problem, hint)
        for code, ns in enumerate(problem.action_ns):
            stage, phase = divmod(code, 3)
            self.begins.append([])
            for k in range(problem.num_microbatches):
                earliest = heads[stage][phase][k] - ns
                latest = self.max_step - tails[stage][2 - phase][-1 - k]
                begin = self.cp.new_int_var(0, self.max_step, f"{code}.{k}")
                # Head and tail shrink the domain: nothing below the incumbent lies outside.
                self.cp.add_linear_constraint(begin, earliest, latest)
                self.begins[code].append(begin)
                # The hint is the incumbent's timeline: CP-SAT repairs it instead of starting from nothing.
                if hinted is not None:
                    self.cp.add_hint(begin, hinted.begins_ns[code][k])
                # Ascending micro-batches (renaming lemma) break the symmetry between them.
                if k:
                    self.cp.add(begin >= self.end(code, k - 1))
                if phase:
                    self.cp.add(begin >= self.end(code - 1, k))
                interval = self.cp.new_fixed_size_interval_var(begin, ns, f"run {code}.{k}")
                self.machines.setdefault(problem.rank_of[stage], []).append(interval)
        if hinted is not None:
            self.cp.add_hint(self.step, hinted.step_ns)

    def add_transfers(self) -> None:
        """Adds the precedences between stages; a transfer is a variable only if it can wait for another."""
        problem = self.problem
        links = problem.links()
        for s in range(problem.num_stages - 1):
            here, there = problem.rank_of[s], problem.rank_of[s + 1]
            # Activations of stage s to s + 1, and gradients of stage s + 1 to s.
            for code, to, link, ns in (
                (3 * s + F, 3 * (s + 1) + F, (here, there), problem.send_ns[s]),
                (3 * (s + 1) + I, 3 * s + I, (there, here), problem.return_ns[s]),
            ):
                blocked = [rank for rank in link if ns and not problem.overlaps_transfers[rank]]
                # A transfer no longer than its sender's action has ended before the next one of its kind is ready.
                never_waits = not blocked and len(links.get(link, ())) <= 1 and ns <= problem.action_ns[code]
                for k in range(problem.num_microbatches):
                    if never_waits:
                        self.cp.add(self.begins[to][k] >= self.end(code, k) + ns)
                    else:
                        self.add_transfer(code, to, k, ns, [link, *blocked])

    def add_transfer(self, code: int, to: int, k: int, ns: int, machines: list[object]) -> None:
        """Adds the transfer of micro-batch k from one code to another, which occupies its link and blocked devices."""
        begin = self.cp.new_int_var(0, self.max_step, f"send {code}.{k}")
        self.cp.add(begin >= self.end(code, k))
        self.cp.add(self.begins[to][k] >= begin + ns)
        interval = self.cp.new_fixed_size_interval_var(begin, ns, f"sending {code}.{k}")
        for machine in machines:
            self.machines.setdefault(machine, []).append(interval)

    def add_memory(self) -> None:
        """Adds the memory limits: precedences if the number in flight decides, else a cumulative constraint."""
        problem = self.problem
        for rank in range(problem.num_ranks):
            stages = problem.stages_on(rank)
            # With one kind of stash the limit is a number of micro-batches: K in flight at most.
            if len(stages) == 1 and not problem.taken_bytes[3 * stages[0] + I]:
                forward, weight_grad = 3 * stages[0] + F, 3 * stages[0] + W
                max_in_flight = problem.max_in_flight(stages[0])
                for k in range(max_in_flight, problem.num_microbatches):
                    self.cp.add(self.begins[forward][k] >= self.end(weight_grad, k - max_in_flight))
            elif stages:
                self.add_cumulative_memory(rank, stages)

    def add_cumulative_memory(self, rank: int, stages: tuple[int, ...]) -> None:
        """Adds stashes and workspaces over time, for a device whose memory does not depend on their number alone."""
        problem = self.problem
        # Demands and the limit are rounded down: at most as tight as the real limit, so the model stays a relaxation.
        unit = -(-max(1, problem.available_bytes[rank]) // MAX_MEMORY_UNITS)
        intervals, demands = [], []
        for s in stages:
            for k in range(problem.num_microbatches):
                for phase in (F, I):
                    # A stash lives from the begin of F or I to the end of W: an interval of variable size.
                    begin, size = self.begins[3 * s + phase][k], self.cp.new_int_var(0, self.max_step, "")
                    intervals.append(self.cp.new_interval_var(begin, size, self.end(3 * s + W, k), ""))
                    demands.append(problem.taken_bytes[3 * s + phase] // unit)
                for phase in (F, I, W):
                    begin, ns = self.begins[3 * s + phase][k], problem.action_ns[3 * s + phase]
                    intervals.append(self.cp.new_fixed_size_interval_var(begin, ns, ""))
                    demands.append(problem.workspace_bytes[s] // unit)
        self.cp.add_cumulative(intervals, demands, problem.available_bytes[rank] // unit)

    def orders(self, solver: "cp_model.CpSolver") -> Orders:
        """Returns a solution's orders; actions of no length go before those that begin at the same time, F first."""
        problem = self.problem
        codes: list[list[tuple[int, ...]]] = [[] for _ in range(problem.num_ranks)]
        for code, begins in enumerate(self.begins):
            stage, phase = divmod(code, 3)
            for begin in begins:
                direction = stage if phase == F else -stage
                # Ties: an action of no length must come before the one it feeds.
                key = (solver.value(begin), int(problem.action_ns[code] > 0), phase, direction, code)
                codes[problem.rank_of[stage]].append(key)
        return tuple(tuple(key[-1] for key in sorted(keys)) for keys in codes)
