"""The order as a constraint model for CP-SAT (OR-tools): better orders and, above all, better bounds.

The model is a relaxation of the judge: it knows its rules but not its haste, so transfers may pass one another and
anything may wait. Every legal table that fits is a solution of the same step time or less (`order_problem.py` shows why
micro-batches may come in ascending order), so the solver's bound holds for all of them, and in a monotone problem the
judge repeats the step time of every solution.

Times are divided by `unit` and rounded down. The bound stays true: keep the order of a real timeline and start
everything as early as the rounded times allow; the longest path of rounded times is no longer than that of the times
divided, so the rounded step is at most step / unit. The rounded question is a question like any other, so heads, tails
and clock are those of `order_bounds.py` and `order_clock.py`.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import floor, gcd
from typing import TYPE_CHECKING

from bapipe.planner.action_order.bounds import heads_and_tails
from bapipe.planner.action_order.evaluate import evaluate_order
from bapipe.planner.action_order.problem import F, I, OrderProblem, Orders, W

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MAX_UNITS = 2**40
"""Longest step the model counts exactly; a longer one is counted in larger units."""
MAX_MEMORY_UNITS = 2**16
"""The room of a device in the model's own units of memory; rounding lets a little more fit, never less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """The solver's orders, None where it has nothing faster, and a bound that no legal table that fits beats."""

    orders: Orders | None
    lower_bound_ns: int


def is_installed() -> bool:
    """Whether OR-tools can be imported."""
    return find_spec("ortools") is not None


def solve(
    problem: OrderProblem, hint: Orders, *, below_ns: int, effort: float, seed: int, max_units: int = MAX_UNITS
) -> SolverResult:
    """Returns orders whose step takes less than `below_ns`, as far as the model can tell, and a bound.

    Stops after `effort` units of the solver's deterministic time. One thread and a fixed seed, so the answer depends on
    the arguments and on the version of OR-tools alone.
    """
    from ortools.sat.python import cp_model

    unit = _unit(problem, below_ns, max_units)
    rounded = _rounded(problem, unit)
    model = _Model(rounded, (below_ns - 1) // unit)
    model.build(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        return SolverResult(orders=None, lower_bound_ns=below_ns)
    assert status != cp_model.MODEL_INVALID, model.cp.validate()
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    # The bound is an integer of at most 40 bits held in a float, or a fraction below one.
    least = floor(solver.best_objective_bound + 1e-6) * unit
    return SolverResult(orders=model.orders(solver) if found else None, lower_bound_ns=max(0, least))


def _unit(problem: OrderProblem, below_ns: int, max_units: int) -> int:
    """Returns the largest unit that loses nothing, or one that keeps the step within `max_units`."""
    exact = gcd(*problem.ns, *problem.send_ns, *problem.return_ns, *problem.update_ns) or 1
    return exact if below_ns // exact <= max_units else -(-below_ns // max_units)


def _rounded(problem: OrderProblem, unit: int) -> OrderProblem:
    return replace(
        problem,
        ns=tuple(ns // unit for ns in problem.ns),
        send_ns=tuple(ns // unit for ns in problem.send_ns),
        return_ns=tuple(ns // unit for ns in problem.return_ns),
        update_ns=tuple(ns // unit for ns in problem.update_ns),
    )


class _Model:
    """The variables of the model, by code and then micro-batch, and how they become an order again."""

    def __init__(self, problem: OrderProblem, most: int) -> None:
        """`most` is the longest step of interest."""
        from ortools.sat.python import cp_model

        self.problem, self.most = problem, most
        self.cp = cp_model.CpModel()
        self.step = self.cp.new_int_var(0, most, "step")
        self.begins: list[list[cp_model.IntVar]] = []
        self.machines: dict[object, list[cp_model.IntervalVar]] = {}  # one thing at a time, by rank or by link

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
        return self.begins[code][k] + self.problem.ns[code]

    def add_actions(self, hint: Orders) -> None:
        """Every action between its head and its tail, micro-batches ascending, F before I before W."""
        problem = self.problem
        heads, tails = heads_and_tails(problem)
        hinted = evaluate_order(problem, hint)
        for code, ns in enumerate(problem.ns):
            stage, phase = divmod(code, 3)
            self.begins.append([])
            for k in range(problem.num_microbatches):
                earliest = heads[stage][phase][k] - ns
                latest = self.most - tails[stage][2 - phase][-1 - k]
                begin = self.cp.new_int_var(0, self.most, f"{code}.{k}")
                self.cp.add_linear_constraint(begin, earliest, latest)
                self.begins[code].append(begin)
                if hinted is not None:
                    self.cp.add_hint(begin, hinted[0][code][k])
                if k:
                    self.cp.add(begin >= self.end(code, k - 1))
                if phase:
                    self.cp.add(begin >= self.end(code - 1, k))
                interval = self.cp.new_fixed_size_interval_var(begin, ns, f"run {code}.{k}")
                self.machines.setdefault(problem.rank_of[stage], []).append(interval)
        if hinted is not None:
            self.cp.add_hint(self.step, hinted[1])

    def add_transfers(self) -> None:
        """The next stage waits for what it is sent; a transfer is a variable only where it can wait for something."""
        problem = self.problem
        links = problem.links()
        for s in range(problem.num_stages - 1):
            here, there = problem.rank_of[s], problem.rank_of[s + 1]
            for code, to, link, ns in (
                (3 * s + F, 3 * (s + 1) + F, (here, there), problem.send_ns[s]),
                (3 * (s + 1) + I, 3 * s + I, (there, here), problem.return_ns[s]),
            ):
                held = [rank for rank in link if ns and not problem.overlaps[rank]]
                at_once = not held and len(links.get(link, ())) <= 1 and ns <= problem.ns[code]
                for k in range(problem.num_microbatches):
                    if at_once:
                        self.cp.add(self.begins[to][k] >= self.end(code, k) + ns)
                    else:
                        self.add_transfer(code, to, k, ns, [link, *held])

    def add_transfer(self, code: int, to: int, k: int, ns: int, machines: list[object]) -> None:
        begin = self.cp.new_int_var(0, self.most, f"send {code}.{k}")
        self.cp.add(begin >= self.end(code, k))
        self.cp.add(self.begins[to][k] >= begin + ns)
        interval = self.cp.new_fixed_size_interval_var(begin, ns, f"sending {code}.{k}")
        for machine in machines:
            self.machines.setdefault(machine, []).append(interval)

    def add_memory(self) -> None:
        problem = self.problem
        for rank in range(problem.num_ranks):
            own = problem.stages_on(rank)
            if len(own) == 1 and not problem.whole_bytes[own[0]]:
                first, last, depth = 3 * own[0] + F, 3 * own[0] + W, problem.depth(own[0])
                for k in range(depth, problem.num_microbatches):
                    self.cp.add(self.begins[first][k] >= self.end(last, k - depth))
            elif own:
                self.add_room(rank, own)

    def add_room(self, rank: int, own: tuple[int, ...]) -> None:
        """Stashes over time, for a device where their number alone does not say what it holds."""
        problem = self.problem
        unit = -(-max(1, problem.room_bytes[rank]) // MAX_MEMORY_UNITS)
        intervals, demands = [], []
        for s in own:
            for k in range(problem.num_microbatches):
                for phase, num_bytes in ((F, problem.kept_bytes[s]), (I, problem.whole_bytes[s])):
                    begin, size = self.begins[3 * s + phase][k], self.cp.new_int_var(0, self.most, "")
                    intervals.append(self.cp.new_interval_var(begin, size, self.end(3 * s + W, k), ""))
                    demands.append(num_bytes // unit)
                for phase in (F, I, W):
                    begin, ns = self.begins[3 * s + phase][k], problem.ns[3 * s + phase]
                    intervals.append(self.cp.new_fixed_size_interval_var(begin, ns, ""))
                    demands.append(problem.workspace_bytes[s] // unit)
        self.cp.add_cumulative(intervals, demands, problem.room_bytes[rank] // unit)

    def orders(self, solver: "cp_model.CpSolver") -> Orders:
        """Returns the solution's orders; actions of no length go before what begins with them, F first."""
        problem = self.problem
        codes: list[list[tuple[int, ...]]] = [[] for _ in range(problem.num_ranks)]
        for code, begins in enumerate(self.begins):
            stage, phase = divmod(code, 3)
            for begin in begins:
                key = (solver.value(begin), int(problem.ns[code] > 0), phase, stage if phase == F else -stage, code)
                codes[problem.rank_of[stage]].append(key)
        return tuple(tuple(key[-1] for key in sorted(keys)) for keys in codes)
