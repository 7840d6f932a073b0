"""Where stages may run: a placement is the devices of one stage, and a path of placements is a pipeline.

Devices are distinguished only by their class (`devices.py`), which removes most of the symmetry of a cluster. The
placements form a directed acyclic graph: the successors of a placement are the possible placements of the next stage,
on the devices that remain. The paths from a root to a placement with `is_last` are the pipelines that are searched.

A stage takes its order from the schedule's table with one stage per device: it has the order of the rank of its first
device, shared among its replicas. For example, 1F1B with two stages on 3 and 1 devices has a warm-up of 4 and of 1
forwards. Placements with the same devices and equal possible continuations are the same object, so that their
cost-to-go is computed once.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from functools import cache, cached_property, partial
from itertools import permutations, product

from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.stages.devices import ClassSymmetry
from bapipe.planner.stages.stage_schedule import StageSchedule, stage_schedule_of
from bapipe.schedules import ALL, SCHEDULES
from bapipe.schedules.table import Schedule

ClassCounts = tuple[int, ...]
"""Numbers of devices. [device classes]"""

ClassSequence = tuple[int, ...]
"""The class of each device, in the order of the devices. [devices]"""


class StagePlacement:
    """The devices of one stage, its order, and the possible placements of the next stage. Hashed by identity.

    Attributes:
        device_classes: the class of each replica's device. [replicas]
        is_last: whether this is the last stage of its pipeline.
        position: the index of the device in the pipeline if devices have several stages, else None.
        receives_activations, receives_gradients: whether the previous, or the next, stage is on another device, so that
            its tensors need receive buffers.
        max_last_replicas: the maximum number of replicas that the last stage can have, if this is not the last one.
        symmetry_key: equal for placements that differ only in an exchange of hosts, and so have equal costs-to-go; None
            if symmetric placements are not known.
    """

    def __init__(
        self,
        device_classes: ClassSequence,
        make_schedule: Callable[[], StageSchedule],
        is_last: bool,
        make_successors: "Callable[[], tuple[StagePlacement, ...]]",
        position: int | None = None,
        receives_activations: bool = True,
        receives_gradients: bool = True,
        max_last_replicas: int = 1,
        symmetry_key: Hashable = None,
    ) -> None:
        self.device_classes, self.is_last, self.position = device_classes, is_last, position
        self.receives_activations, self.receives_gradients = receives_activations, receives_gradients
        self.max_last_replicas, self.symmetry_key = max_last_replicas, symmetry_key
        self._make_schedule, self._make_successors = make_schedule, make_successors
        self._successors: tuple[StagePlacement, ...] | None = None

    @property
    def num_replicas(self) -> int:
        return len(self.device_classes)

    @cached_property
    def schedule(self) -> StageSchedule:
        """The order of the stage, made when first needed, because some tables take long."""
        return self._make_schedule()

    def distinct_replicas(self) -> list[int]:
        """Returns the indices of the replicas, only the last of equal ones, ascending.

        The last one gives the largest work bound, because most micro-batches arrive before its first one.
        """
        last_of = {
            # For equal keys the dict keeps the last k.
            (c, load.num_microbatches, load.memory_peaks): k
            for k, (c, load) in enumerate(zip(self.device_classes, self.schedule.replicas, strict=True))
        }
        return sorted(last_of.values())

    def on(self, device_classes: ClassSequence) -> "StagePlacement":
        """Returns this placement with devices of other classes. [replicas]"""
        other = copy(self)
        other.device_classes = device_classes
        return other

    @property
    def successors(self) -> "tuple[StagePlacement, ...]":
        """The possible placements of the next stage, made when first needed; () if there are none."""
        if self._successors is None:
            self._successors = self._make_successors()
        return self._successors


def reachable(first: Iterable[StagePlacement]) -> Iterator[StagePlacement]:
    """Yields the placements `first` and all that can follow them, each once."""
    stack = list(first)  # no recursion, because pipelines may be long
    seen = set(stack)
    while stack:
        placement = stack.pop()
        yield placement
        following = [other for other in placement.successors if other not in seen]
        seen.update(following)
        stack += following


def in_postorder(
    first: Iterable[StagePlacement], is_done: Callable[[StagePlacement], bool]
) -> Iterator[StagePlacement]:
    """Yields the placements `first` and all that can follow them, each after its successors, except those done.

    `is_done` must become true for a placement when it has been yielded.
    """
    stack = list(first)  # no recursion, because pipelines may be long
    while stack:
        if is_done(stack[-1]):
            stack.pop()
            continue
        missing = [other for other in stack[-1].successors if not is_done(other)]
        if missing:
            stack += missing
        else:
            yield stack.pop()


class PlacementGraph:
    """Makes the placements for one schedule and number of micro-batches; equal ones are the same object.

    Attributes:
        symmetry: recognizes choices of devices that differ only in an exchange of hosts.
        replicas: whether a stage may have several devices.
        permute_replicas: whether the replicas of a stage are tried in every order, not only in ascending order of their
            classes.
    """

    def __init__(
        self,
        schedule: str,
        num_microbatches: int,
        symmetry: ClassSymmetry,
        *,
        replicas: bool,
        permute_replicas: bool = False,
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """After `deadline`, making a table or a placement raises OutOfTime."""
        self._deadline = deadline
        self.schedule, self.num_microbatches, self.replicas = schedule, num_microbatches, replicas
        self.symmetry, self.permute_replicas = symmetry, permute_replicas
        self._tables: dict[int, Schedule] = {}
        # Numbers instead of long tuples of actions: equal orders have equal numbers, which are fast to compare.
        self._ids: dict[Hashable, int] = {}
        self._order_ids: dict[tuple[int, int], int] = {}
        self._suffix_ids: dict[tuple[int, int], int] = {}
        self._stage_schedules: dict[tuple[int, int], StageSchedule] = {}
        self._multi_stage_schedules: dict[tuple[int, int], StageSchedule] = {}
        self._placements: dict[Hashable, StagePlacement] = {}

    def table(self, num_devices: int) -> Schedule:
        """Returns the schedule's table on this number of ranks; without replicas."""
        if num_devices not in self._tables:
            self._deadline.check()
            self._tables[num_devices] = ALL[self.schedule](num_devices, self.num_microbatches)
        return self._tables[num_devices]

    def roots_any_order(self, used: ClassCounts, num_stages: int | None) -> tuple[StagePlacement, ...]:
        """Returns the first placements of all pipelines on exactly these devices, in any order.

        With `num_stages` stages, or any number if that is None.
        """
        return self._any_order(used, sum(used), num_stages)

    def roots_in_order(self, devices: Sequence[int], num_stages: int | None) -> tuple[StagePlacement, ...]:
        """Returns the first placements of all pipelines whose stages take consecutive ones of all these devices.

        With `num_stages` stages, or any number if that is None.
        """
        return self._in_order(tuple(devices), len(devices), num_stages)

    def roots_multi_stage(self, devices: Sequence[int]) -> tuple[StagePlacement, ...]:
        """Returns the first placement of a schedule with several stages per device; `devices` are given by class.

        The table says which device runs each stage, so every placement has one successor, and stages have no replicas.
        """
        positions = positions_of_stages(self.schedule, len(devices))

        def make(stage: int) -> StagePlacement:
            """Returns the placement of one stage, which makes that of the next one when needed."""
            position = positions[stage]
            is_last = stage + 1 == len(positions)
            return StagePlacement(
                (devices[position],),
                partial(self._multi_stage_schedule, len(devices), stage),
                is_last,
                lambda: () if is_last else (make(stage + 1),),
                position,
                # Tensors between two stages of one device need no receive buffer.
                receives_activations=stage > 0 and positions[stage - 1] != position,
                receives_gradients=not is_last and positions[stage + 1] != position,
            )

        return (make(0),)

    def _any_order(self, remaining: ClassCounts, num_used: int, num_stages: int | None) -> tuple[StagePlacement, ...]:
        """Returns the placements of the next stage on any subset of the devices that remain of `num_used` ones."""
        self._deadline.check()
        num_remaining = sum(remaining)
        # All that later stages depend on besides their devices: the orders of the table from here on, and how many
        # stages must follow. Without `num_used`, pipelines on different numbers of devices share placements.
        state = (self._suffix_id(num_used, num_used - num_remaining), num_stages, "any order")
        max_replicas = self._max_replicas(num_remaining)
        placements = []
        # group, after: how many devices of each class this stage has, and all later stages together. [classes]
        for group in product(*(range(min(count, max_replicas) + 1) for count in remaining)):
            after = tuple(have - taken for have, taken in zip(remaining, group, strict=True))
            if not 0 < sum(group) <= max_replicas or not self._can_finish(sum(after), num_stages):
                continue
            ascending = tuple(c for c, count in enumerate(group) for _ in range(count))
            make_successors = partial(self._any_order, after, num_used, _one_less(num_stages))
            # With replicas in every order the key would have to contain the order.
            symmetry_key = None if self.permute_replicas else (*state, self.symmetry.key(group, after))
            # Replica k runs micro-batches k, k + R, ..., so the order of unlike devices matters.
            for devices in sorted(set(permutations(ascending))) if self.permute_replicas else [ascending]:
                key = (*state, remaining, devices)
                is_last = sum(after) == 0
                placements.append(
                    self._make(key, devices, num_used, num_remaining, is_last, make_successors, symmetry_key)
                )
        return tuple(placements)

    def _in_order(self, remaining: ClassSequence, num_used: int, num_stages: int | None) -> tuple[StagePlacement, ...]:
        """Returns the placements of the next stage on the first of the devices that remain."""
        self._deadline.check()
        state = (self._suffix_id(num_used, num_used - len(remaining)), num_stages, "in order", remaining)
        placements = []
        for size in range(1, self._max_replicas(len(remaining)) + 1):
            if self._can_finish(len(remaining) - size, num_stages):
                is_last = size == len(remaining)
                # Classes ascend from the fastest: the fastest device takes micro-batch 0.
                devices = tuple(sorted(remaining[:size]))
                make_successors = partial(self._in_order, remaining[size:], num_used, _one_less(num_stages))
                key = (*state, size)
                placements.append(self._make(key, devices, num_used, len(remaining), is_last, make_successors, None))
        return tuple(placements)

    def _make(
        self,
        key: Hashable,
        devices: ClassSequence,
        num_used: int,
        num_remaining: int,
        is_last: bool,
        make_successors: Callable[[], tuple[StagePlacement, ...]],
        symmetry_key: Hashable,
    ) -> StagePlacement:
        """Returns the placement with a key, made when it is first asked for."""
        if key not in self._placements:
            self._deadline.check()
            # The rank of the stage's first device in the table with one stage per device, whose order the stage has.
            first = num_used - num_remaining
            self._placements[key] = StagePlacement(
                devices,
                partial(self._stage_schedule, num_used, first, len(devices)),
                is_last,
                (lambda: ()) if is_last else make_successors,
                max_last_replicas=self._max_replicas(num_remaining - len(devices)),
                symmetry_key=symmetry_key,
            )
        return self._placements[key]

    def _max_replicas(self, num_remaining: int) -> int:
        return min(num_remaining, self.num_microbatches) if self.replicas else 1

    def _can_finish(self, num_remaining: int, num_stages: int | None) -> bool:
        """Returns whether the devices that remain after this stage can be those of the other stages.

        `num_stages` counts this stage and those after it; None if any number will do.
        """
        return num_stages is None or (num_remaining == 0 if num_stages == 1 else num_remaining >= num_stages - 1)

    def _order_id(self, num_used: int, first: int) -> int:
        """Returns a number for the order of rank `first` of `num_used`, the same whatever its stage's number."""
        if (num_used, first) not in self._order_ids:
            actions = tuple((phase, m) for _, phase, m in self.table(num_used).order[first])
            self._order_ids[num_used, first] = self._ids.setdefault(actions, len(self._ids))
        return self._order_ids[num_used, first]

    def _suffix_id(self, num_used: int, first: int) -> int:
        """Returns a number for the orders of all ranks from `first` on in the table on `num_used` ranks.

        For example, in 1F1B the last 3 of 5 ranks have the same orders as the last 3 of 8, so they share placements.
        """
        if first == num_used:
            return -1
        if (num_used, first) not in self._suffix_ids:
            following = -1
            for rank in reversed(range(first, num_used)):  # no recursion, because there may be many
                suffix = (self._order_id(num_used, rank), following, "suffix")
                following = self._suffix_ids[num_used, rank] = self._ids.setdefault(suffix, len(self._ids))
        return self._suffix_ids[num_used, first]

    def _stage_schedule(self, num_used: int, first: int, num_replicas: int) -> StageSchedule:
        """Returns the order of a stage on some replicas, the first of which is rank `first` of `num_used`."""
        key = (self._order_id(num_used, first), num_replicas)
        if key not in self._stage_schedules:
            self._stage_schedules[key] = stage_schedule_of(self.table(num_used).order[first], num_replicas)
        return self._stage_schedules[key]

    def _multi_stage_schedule(self, num_devices: int, stage: int) -> StageSchedule:
        """Returns the order of a stage on a device with several stages."""
        if (num_devices, stage) not in self._multi_stage_schedules:
            table = self.table(num_devices)
            (position,) = table.devices[stage]
            order = tuple(action for action in table.order[position] if action.stage == stage)
            self._multi_stage_schedules[num_devices, stage] = stage_schedule_of(order, 1)
        return self._multi_stage_schedules[num_devices, stage]


@cache
def positions_of_stages(schedule: str, num_devices: int) -> tuple[int, ...]:
    """Returns the rank of each stage of a schedule with several stages per device. [stages]

    Most schedules go over the ranks in rounds or in a V. These are recognized in the table of three devices, because a
    table of hundreds of devices takes seconds.
    """
    of_shape, num_rounds = _shape_and_rounds(schedule)
    return _ranks_in_table(schedule, num_devices) if of_shape is None else of_shape(num_devices, num_rounds)


@cache
def _shape_and_rounds(schedule: str) -> tuple[Callable[[int, int], tuple[int, ...]] | None, int]:
    """Returns how a schedule goes over the ranks, None if in another way, and how often."""
    of_three = _ranks_in_table(schedule, 3)
    num_rounds = len(of_three) // 3
    shapes = (_ranks_in_rounds, _ranks_in_v)
    return next((of_shape for of_shape in shapes if of_three == of_shape(3, num_rounds)), None), num_rounds


def num_stages_on(schedule: str, num_devices: int) -> int:
    """Returns how many stages a schedule has on a number of devices without replicas."""
    if schedule in SCHEDULES:
        return num_devices
    of_shape, num_rounds = _shape_and_rounds(schedule)
    return len(positions_of_stages(schedule, num_devices)) if of_shape is None else num_rounds * num_devices


def most_stages(schedules: Iterable[str], num_devices: int) -> int:
    """Returns the maximum number of stages that any of some schedules has on a number of devices."""
    return max(num_stages_on(name, num_devices) for name in schedules)


def _ranks_in_rounds(num_devices: int, num_rounds: int) -> tuple[int, ...]:
    """Returns 0, ..., n - 1, then the same again. [stages]"""
    return tuple(range(num_devices)) * num_rounds


def _ranks_in_v(num_devices: int, num_rounds: int) -> tuple[int, ...]:
    """Returns 0, ..., n - 1, then n - 1, ..., 0, and so on. [stages]"""
    there = tuple(range(num_devices))
    return tuple(rank for number in range(num_rounds) for rank in (there[::-1] if number % 2 else there))


def _ranks_in_table(schedule: str, num_devices: int) -> tuple[int, ...]:
    return tuple(rank for (rank,) in ALL[schedule](num_devices, 1).devices)


def _one_less(num_stages: int | None) -> int | None:
    return None if num_stages is None else num_stages - 1
