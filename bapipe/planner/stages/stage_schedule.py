"""What the order of a schedule means for one stage and its replicas: as much as bounds and memory checks need.

A stage on R replicas runs micro-batch m on replica m mod R, and every replica keeps the order of the schedule. Two
numbers describe how forwards and backwards alternate on a replica:

    max_in_flight   d   F of micro-batch m + d comes after the backward of micro-batch m
    forwards_ahead  a   F of micro-batch m + a comes before the backward of micro-batch m

For example, 1F1B has d = k + 1 and a = k at a stage with k stages after it; GPipe with M micro-batches has d = M.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.schedules.table import Action, Phase
from bapipe.simulator.in_flight import InFlight, in_flight_during


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What one replica of a stage does in a step.

    Attributes:
        num_microbatches: how many it runs.
        memory_peaks: the Pareto-maximal states of its memory. Whatever the sizes of the layers, the peak in bytes is
            the maximum over these states.
    """

    num_microbatches: int
    memory_peaks: tuple[InFlight, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """The order of one stage, shared among its replicas.

    Attributes:
        replicas: the load of each replica.
        max_in_flight: d: on every replica, F of micro-batch m + d comes after B or I of micro-batch m.
        forwards_ahead: a: on every replica, F of micro-batch m + a comes before B or I of micro-batch m, if there is a
            micro-batch m + a.
        phases: the phases that occur in the order.
        last_phases: the phases of the last actions of the replicas: B, W, or both.
    """

    replicas: tuple[ReplicaLoad, ...]
    max_in_flight: int
    forwards_ahead: int
    phases: frozenset[Phase]
    last_phases: frozenset[Phase]

    @property
    def num_microbatches(self) -> int:
        """The micro-batches of a step, on all replicas together."""
        return sum(replica.num_microbatches for replica in self.replicas)

    @property
    def has_split_backward(self) -> bool:
        """Whether I and W run as separate actions."""
        return Phase.INPUT_GRAD in self.phases

    @property
    def has_full_backward(self) -> bool:
        """Whether some micro-batch has a B, not I and W."""
        return Phase.BACKWARD in self.phases


def stage_schedule_of(order: Sequence[Action], num_replicas: int) -> StageSchedule:
    """Returns the order of a stage shared among `num_replicas` replicas. O(actions)."""
    # Micro-batch m runs on replica m mod R; each replica keeps the order of the schedule. [replicas][actions]
    orders = [[action for action in order if action.microbatch % num_replicas == k] for k in range(num_replicas)]
    in_flight = [_in_flight_at_backwards(actions, num_replicas) for actions in orders]
    # Let c be the number of F, from that of the k-th micro-batch on, that come before its backward. Then F of the
    # (k + c)-th comes after this backward and F of the (k + c - 1)-th before it. Over all k, d is the maximum of c, and
    # a is the minimum of c less 1.
    max_in_flight = max(max(counts, default=1) for counts in in_flight)
    # For the last micro-batches of a replica c is small only because no F are left, so they do not count for a.
    min_in_flight = min(
        (count for counts in in_flight for m, count in enumerate(counts) if m + count < len(counts)),
        default=max_in_flight,
    )
    return StageSchedule(
        replicas=tuple(
            ReplicaLoad(
                num_microbatches=sum(action.phase is Phase.FORWARD for action in actions),
                memory_peaks=memory_peaks(actions),
            )
            for actions in orders
        ),
        # The counts are of micro-batches of one replica, which are `num_replicas` apart.
        max_in_flight=max_in_flight * num_replicas,
        forwards_ahead=(min_in_flight - 1) * num_replicas,
        phases=frozenset(action.phase for action in order),
        last_phases=frozenset(actions[-1].phase for actions in orders if actions),
    )


def runs_forwards_first(order: Sequence[Action]) -> bool:
    """Returns whether every F of a rank comes before its first backward, as in GPipe."""
    phases = [action.phase for action in order]
    return Phase.FORWARD not in phases[phases.count(Phase.FORWARD) :]


def _in_flight_at_backwards(order: Sequence[Action], num_replicas: int) -> list[int]:
    """Returns for every micro-batch of a replica how many F, from its own on, come before its B or I."""
    num_forwards = 0
    in_flight: dict[int, int] = {}
    for _, phase, microbatch in order:
        if phase is Phase.FORWARD:
            num_forwards += 1
        elif phase is not Phase.WEIGHT_GRAD:
            in_flight[microbatch] = max(1, num_forwards - microbatch // num_replicas)
    return [in_flight[microbatch] for microbatch in sorted(in_flight)]


def memory_peaks(order: Sequence[Action]) -> tuple[InFlight, ...]:
    """Returns the Pareto-maximal states of a replica's memory over its actions."""
    states = set(in_flight_during(action.phase for action in order))
    peaks: list[InFlight] = []
    for state in sorted(states, reverse=True):  # lexicographically descending: only earlier ones can dominate
        if not any(all(a <= b for a, b in zip(state, other, strict=True)) for other in peaks):
            peaks.append(state)
    return tuple(peaks)
