"""The order of one stage, shared among its replicas: what the bounds and the memory check need to know of it.

A stage on R replicas runs micro-batch m on replica m mod R, and every replica keeps the order of the schedule. Two
numbers describe how forwards and backwards alternate on a replica:

    max_in_flight   d   F of micro-batch m + d comes after the backward of micro-batch m
    forwards_ahead  a   F of micro-batch m + a comes before the backward of micro-batch m

so 1F1B on the stage that is s-th from the end has d = s + 1 and a = s, and GPipe with M micro-batches d = M.
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
        memory_peaks: the states in which its memory can be at its maximum: no peak is dominated by another one, so the
            peak in bytes is the maximum over these whatever the layers' sizes are.
    """

    num_microbatches: int
    memory_peaks: tuple[InFlight, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """An order of one stage, shared among its replicas.

    Attributes:
        replicas: the load of each replica.
        max_in_flight: d, on any replica: F of micro-batch m + d follows B or I of micro-batch m on the same replica.
        forwards_ahead: a, on every replica: F of micro-batch m + a comes before B or I of micro-batch m on the same
            replica, if there is a micro-batch m + a.
        phases: the phases in the order.
        last_phases: the phases that can come last on a replica: B, W, or both.
    """

    replicas: tuple[ReplicaLoad, ...]
    max_in_flight: int
    forwards_ahead: int
    phases: frozenset[Phase]
    last_phases: frozenset[Phase]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all replicas."""
        return sum(replica.num_microbatches for replica in self.replicas)

    @property
    def has_split_backward(self) -> bool:
        """Whether I and W run as separate actions."""
        return Phase.INPUT_GRAD in self.phases

    @property
    def has_full_backward(self) -> bool:
        """Whether there is a B."""
        return Phase.BACKWARD in self.phases


def stage_schedule_of(order: Sequence[Action], num_replicas: int) -> StageSchedule:
    """Returns the order of a stage shared among `num_replicas` replicas. O(actions)."""
    # Micro-batch m runs on replica m mod R, in the order that the table has. [replicas][actions]
    orders = [[action for action in order if action.microbatch % num_replicas == k] for k in range(num_replicas)]
    in_flight = [_in_flight_at_backwards(actions, num_replicas) for actions in orders]
    # If c forwards, from the k-th micro-batch's own on, come before its backward, then F of the (k + c)-th comes after
    # it and F of the (k + c - 1)-th before it. For all k, d is the maximum of c, and a the minimum less 1.
    max_in_flight = max(max(counts, default=1) for counts in in_flight)
    # The last micro-batches of a replica have fewer forwards ahead only because there are no more: leave these out.
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
        # Counted in micro-batches of the replica, which are `num_replicas` apart.
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
    """For every micro-batch of a replica, how many F, its own one and later ones, come before its B or I."""
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
