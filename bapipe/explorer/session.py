"""What one page explores: profiles and a cluster, and the answers to what its controls say."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from bapipe.errors import BapipeError
from bapipe.explorer.answers import Json, explained, layers_json, model_json, recorded_json, step_json
from bapipe.explorer.state import State, cluster_of
from bapipe.formats.certificate import Certificate, certify
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.prediction import Prediction
from bapipe.formats.profile import LOSS, ProfilesByKind
from bapipe.planner.analysis.exchange import exchange_share, fixed_exchange_words
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes
from bapipe.planner.make import balanced_decision, default_devices, exceeds_limit, plan_of
from bapipe.planner.results.decision import Decision, decision_of, simulate_decision
from bapipe.planner.results.work_bound import WORK_BOUND, work_bound_ns
from bapipe.report.plan_changes import render_changes
from bapipe.schedules import ALL, LOOPED
from bapipe.schedules.table import Schedule
from bapipe.simulator.tied_weights import legal_cuts
from bapipe.simulator.timeline import StepColumns, Timeline

Shape = tuple[str, tuple[tuple[str, ...], ...], int]
"""Schedule, devices of each stage, and number of micro-batches: what an order of actions depends on."""


class Session:
    """The profiles and the cluster of a page, and the bounds and orders that were found while it was used.

    Args:
        start: the plan to begin with; or the size of a mini-batch, to begin with stages that take about equally long.
        commands: returns the command lines that make the plan of a state.
        measured: recorded steps of the plan to begin with, by title.

    Raises:
        BapipeError: profiles that do not match the cluster or one another, or no plan to begin with.
    """

    def __init__(
        self,
        profiles: ProfilesByKind,
        cluster: Cluster,
        start: Plan | int,
        commands: Callable[[Decision, State], list[str]] = lambda decision, state: [],
        measured: Sequence[tuple[str, Timeline]] = (),
    ) -> None:
        minibatch_size = start.minibatch_size if isinstance(start, Plan) else start
        check_inputs(profiles, cluster, PlanOptions(minibatch_size=minibatch_size))
        self.profiles, self.cluster, self._commands = dict(profiles), cluster, commands
        self.profile = self.profiles[cluster.devices[0].kind]
        self.start = start if isinstance(start, Plan) else None
        self._names = tuple(layer.name for layer in self.profile.layers)
        # Bounds that searches proved, by what they hold for and by their space: a plan outside of it may be faster.
        # Orders that no schedule has a name for, by their shape.
        self._proven: dict[tuple[Cluster, int], dict[str, Certificate]] = {}
        self._orders: dict[Shape, Schedule] = {}
        self._work_bounds: dict[tuple[Cluster, int], int] = {}
        self._measured = recorded_json(measured)
        self._checked: set[tuple[Cluster, int, str]] = set()
        self._lock = threading.Lock()
        self.first = self._first_state(start)

    def _first_state(self, start: Plan | int) -> State:
        if isinstance(start, Plan):
            return self.adopt(start)
        num_stages = self._max_stages("1f1b", self.cluster)
        options = PlanOptions(minibatch_size=start)
        sizes = microbatch_sizes(self.profiles, self.cluster, options)
        # As many micro-batches as fill the pipeline twice, so that there is something to see.
        size = max((size for size in sizes if start // size >= 2 * num_stages), default=sizes[0])
        devices = default_devices("1f1b", num_stages, start // size, self.cluster)
        decision = balanced_decision(self.profiles, self.cluster, devices, "1f1b", start, size)
        return self._state_of(decision, self.cluster, None)

    def _max_stages(self, schedule: str, cluster: Cluster) -> int:
        """Returns the most stages of a schedule that devices and layers allow."""
        stages_per_device = 2 if schedule in LOOPED else 1
        num_devices = min(len(cluster.devices), (len(legal_cuts(self.profile.layers)) + 1) // stages_per_device)
        return stages_per_device * max(1, num_devices)

    def adopt(self, plan: Plan, like: State | None = None) -> State:
        """Returns the state of a plan, and remembers its bound and its order.

        Args:
            like: the state that the plan was searched from; its changes of the cluster stay.
        """
        decision = decision_of(plan)
        with self._lock:
            if decision.own_table is not None:
                self._orders[decision.schedule, decision.devices, decision.num_microbatches] = decision.own_table
            if plan.certificate.lower_bound_ns and plan.objective is msgspec.UNSET and not (like and like.constraints):
                self._remember(plan)
        return self._state_of(decision, plan.cluster, like)

    def _remember(self, plan: Plan) -> None:
        known, proven = self._proven.setdefault((plan.cluster, plan.minibatch_size), {}), plan.certificate
        if proven.space not in known or known[proven.space].lower_bound_ns < proven.lower_bound_ns:
            known[proven.space] = proven

    def _bounds(self, cluster: Cluster, minibatch_size: int, above_ns: int, most_ns: int) -> list[Certificate]:
        """Returns the proven bounds between two times, those first that are preferred."""
        with self._lock:
            proven = [*self._proven.get((cluster, minibatch_size), {}).values()]
        return sorted(
            (c for c in proven if above_ns < c.lower_bound_ns <= most_ns), key=_how_far_it_holds, reverse=True
        )

    def _state_of(self, decision: Decision, cluster: Cluster, like: State | None) -> State:
        index = {name: i for i, name in enumerate(self._names)}
        order = tuple(index[name] for name in decision.layers)
        decided: dict[str, Any] = {
            "cuts": decision.cuts,
            "devices": decision.devices,
            "recompute": decision.recompute,
            "recompute_layers": tuple(sorted(decision.recompute_layers)),
            "layer_order": None if decision.layers == self._names else order,
            "schedule": decision.schedule,
            "minibatch_size": decision.minibatch_size,
            "microbatch_size": decision.microbatch_size,
        }
        if like is not None:
            return msgspec.structs.replace(like, **decided)
        return State(num_devices=len(cluster.devices), **decided)

    def decision(self, state: State) -> tuple[Decision, Cluster]:
        """Returns the decisions of a state and its cluster; raises BapipeError if its layers are not the model's."""
        cluster = cluster_of(state, self.cluster)
        order = range(len(self._names)) if state.layer_order is None else state.layer_order
        if sorted(order) != list(range(len(self._names))):
            raise BapipeError(f"the order of the layers is not one of all {len(self._names)} layers")
        decision = Decision(
            layers=tuple(self._names[i] for i in order),
            cuts=state.cuts,
            devices=state.devices,
            recompute=state.recompute,
            recompute_layers=frozenset(state.recompute_layers) - {LOSS},
            schedule=state.schedule,
            minibatch_size=state.minibatch_size,
            microbatch_size=state.microbatch_size,
        )
        with self._lock:
            own = self._orders.get((state.schedule, state.devices, decision.num_microbatches))
        return replace(decision, own_table=own), cluster

    def simulate(self, state: State) -> tuple[Decision, Cluster, StepColumns]:
        """Returns the step of a state; raises BapipeError if it cannot run."""
        decision, cluster = self.decision(state)
        self._check(state, cluster)
        return decision, cluster, simulate_decision(decision, self.profiles, cluster)

    def _check(self, state: State, cluster: Cluster) -> None:
        """Raises BapipeError if the profiles do not go with a state; once for all cuts, since it reads every layer."""
        schedule = state.schedule if state.schedule in ALL else "1f1b"
        key = cluster, state.minibatch_size, schedule
        if key not in self._checked:
            options = PlanOptions(minibatch_size=state.minibatch_size, schedules=[schedule])
            check_inputs(self.profiles, cluster, options)
            self._checked.add(key)

    def judge(self, state: State, *, detailed: bool = True) -> Json:
        """Returns the simulated step of a state; if it cannot run, the reason.

        Args:
            detailed: with the critical path, the causes of idle times and the command line; a page leaves these
                out while a cut is dragged.
        """
        try:
            decision, cluster, step = self.simulate(state)
        except BapipeError as error:
            return {"error": str(error).replace("`", "")}
        prediction = step.prediction(state.minibatch_size)
        bound = self._bound(cluster, state.minibatch_size, prediction)
        answer = step_json(prediction, step, cluster, bound) | self._exchange(decision, cluster)
        if not detailed:
            return answer
        return explained(answer, prediction, step.timeline(), cluster) | {
            "command": self._commands(decision, state),
            "measured": self._measured if state == self.first else [],
        }

    def _exchange(self, decision: Decision, cluster: Cluster) -> Json:
        """Returns the share of each stage's time in which members of groups exchange data; nothing without groups."""
        of_stage = [cluster.devices[cluster.index[devices[0]]] for devices in decision.devices]
        if all(device.num_members == 1 for device in of_stage):
            return {}
        shares = [
            exchange_share(stage, self.profiles[device.kind], decision.microbatch_size, device.speed)
            if device.num_members > 1
            else None
            for stage, device in zip(decision.stages, of_stage, strict=True)
        ]
        return {"exchange": shares}

    def _bound(self, cluster: Cluster, minibatch_size: int, prediction: Prediction) -> Json:
        """Returns the largest lower bound that is known for plans such as one for a cluster and a mini-batch."""
        key = cluster, minibatch_size
        with self._lock:
            if key not in self._work_bounds:
                self._work_bounds[key] = work_bound_ns(self.profiles, cluster, minibatch_size)
            work_ns = self._work_bounds[key]
        # A plan that is faster than a bound, or needs more memory, lies outside the space that the bound is about.
        for proven in self._bounds(cluster, minibatch_size, work_ns, prediction.step_ns):
            if not exceeds_limit(prediction, cluster, proven.memory):
                return {"ns": proven.lower_bound_ns, "space": proven.space, "searched": True}
        return {"ns": work_ns, "space": WORK_BOUND, "searched": False}

    def plan(self, state: State) -> Plan:
        """Returns the plan of a state, as `bapipe run` takes it; raises BapipeError if it cannot run."""
        decision, cluster, step = self.simulate(state)
        made = plan_of(decision, self.profiles, cluster, step, changed_from=self.start)
        step_ns = made.prediction.step_ns
        bounds = self._bounds(cluster, state.minibatch_size, made.certificate.lower_bound_ns, step_ns)
        if not bounds:
            return made
        certificate = certify(step_ns, bounds[0].lower_bound_ns, bounds[0].space, bounds[0].memory)
        known = msgspec.structs.replace(made, certificate=certificate)
        return plan_of(decision, self.profiles, cluster, step, changed_from=known)

    def try_plan(self, plan: Plan, state: State) -> Plan | None:
        """Returns a plan simulated on the cluster of a state; None if it cannot run there, or there are pins."""
        if state.constraints:
            return None
        tried = self.adopt(plan, state)
        return self.fitting_plan(msgspec.structs.replace(tried, minibatch_size=state.minibatch_size))

    def fitting_plan(self, state: State) -> Plan | None:
        """Returns the plan of a state; None if it cannot run or does not fit."""
        try:
            own = self.plan(state)
        except BapipeError:
            return None
        limits = {device.name: device.memory_bytes for device in own.cluster.devices}
        return own if all(rank.peak_bytes <= limits[rank.device] for rank in own.prediction.ranks) else None

    def changes(self, before: State, after: State) -> list[str]:
        """Returns the differences of two states' plans in words."""
        return list(render_changes(self.plan(before), self.plan(after)))

    def default_devices(self, state: State, num_stages: int | None) -> State:
        """Returns the state with a number of stages on the devices in order, cut where they take equally long.

        Args:
            num_stages: None for as many as devices and layers allow.
        """
        _, cluster = self.decision(state)
        self._check(state, cluster)
        size = state.microbatch_size
        num_stages = num_stages or self._max_stages(state.schedule, cluster)
        devices = default_devices(state.schedule, num_stages, state.minibatch_size // size, cluster)
        made = balanced_decision(self.profiles, cluster, devices, state.schedule, state.minibatch_size, size)
        return self._state_of(made, cluster, state)

    def model(self) -> Json:
        """Returns the layers, the choices of the controls, and the state to begin with."""
        return model_json(self.profile) | {
            "legal": legal_cuts(self.profile.layers),
            "schedules": list(ALL),
            "fixedExchange": fixed_exchange_words(self.cluster.devices).replace("`", ""),
            "state": msgspec.to_builtins(self.first),
        }

    def sizes(self, state: State) -> list[int]:
        """Returns the micro-batch sizes that a mini-batch allows."""
        options = PlanOptions(minibatch_size=state.minibatch_size)
        return microbatch_sizes(self.profiles, cluster_of(state, self.cluster), options)

    def layers(self, microbatch_size: int) -> Json:
        """Returns the times and bytes of the layers at a micro-batch size."""
        return layers_json(self.profile, microbatch_size)


def _how_far_it_holds(certificate: Certificate) -> tuple[bool, int]:
    """Returns a key by which to prefer bounds: first those of plans that may use all memory, then the largest."""
    return certificate.memory is msgspec.UNSET, certificate.lower_bound_ns
