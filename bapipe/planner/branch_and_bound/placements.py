"""Where stages may run: a slot is the devices of one stage and their order; a path of slots is a pipeline.

Devices are told apart by class only. The order of a stage is that of the first of its devices in the schedule's table
for as many stages as there are devices, shared among its devices: 1F1B on 3 + 1 devices has a warm-up of 4 and of 1.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import permutations, product

from bapipe.planner.branch_and_bound.stage_schedule import StageSchedule, turns
from bapipe.schedules import ALL
from bapipe.schedules.table import Schedule

ClassCounts = tuple[int, ...]
"""How many devices of each class."""


class StagePlacement:
    """A place for a stage.

    Attributes:
        devices: the class of each of its devices.
        place: the device's place in the pipeline where devices have several stages, else None.
        receives, returns: whether the stages before and after are on other devices.
        last: whether the pipeline ends here.
        most_last: devices that the last stage has at most, if that is a later one.
        alike: the same for slots that differ only in which of some twins has which part; None where that is not known.
    """

    def __init__(
        self,
        devices: ClassCounts,
        turns: StageSchedule,
        last: bool,
        follow: "Callable[[], tuple[StagePlacement, ...]]",
        place: int | None = None,
        receives: bool = True,
        returns: bool = True,
        most_last: int = 1,
        alike: Hashable = None,
    ) -> None:
        self.devices, self.turns, self.last, self.place = devices, turns, last, place
        self.receives, self.returns, self.most_last, self.alike = receives, returns, most_last, alike
        self._follow = follow
        self._next: tuple[StagePlacement, ...] | None = None

    @property
    def next(self) -> "tuple[StagePlacement, ...]":
        """The slots that can come after this one."""
        if self._next is None:
            self._next = self._follow()
        return self._next


class PlacementGraph:
    """The slots of one schedule and number of micro-batches; equal ones are the same object."""

    def __init__(
        self, schedule: str, num_microbatches: int, twins: Sequence[int], *, replicas: bool, arranged: bool = False
    ) -> None:
        self.schedule, self.num_microbatches, self.replicas = schedule, num_microbatches, replicas
        self.twins = tuple(twins)
        self.arranged = arranged  # whether unlike devices of one stage are taken in every order
        self._tables: dict[int, Schedule] = {}
        self._orders: dict[Hashable, int] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._rests: dict[tuple[int, int], int] = {}
        self._turns: dict[tuple[int, int], StageSchedule] = {}
        self._slots: dict[Hashable, StagePlacement] = {}

    def table(self, num_devices: int) -> Schedule:
        """Returns the schedule with one device a stage, or a device for each of its ranks."""
        if num_devices not in self._tables:
            self._tables[num_devices] = ALL[self.schedule](num_devices, self.num_microbatches)
        return self._tables[num_devices]

    def free(self, used: ClassCounts, num_stages: int | None) -> tuple[StagePlacement, ...]:
        """Returns the first slots of all pipelines that use these devices, in any order, as any number of stages."""
        return self._after(used, sum(used), num_stages)

    def in_order(self, devices: Sequence[int], num_stages: int | None) -> tuple[StagePlacement, ...]:
        """Returns the first slots of the pipelines whose stages take runs of these devices, given by class."""
        return self._runs(tuple(devices), len(devices), num_stages)

    def looped(self, devices: Sequence[int]) -> tuple[StagePlacement, ...]:
        """Returns the first slot of a schedule with several stages a device, on devices given by class."""
        table = self.table(len(devices))

        def make(stage: int) -> StagePlacement:
            place = table.devices[stage][0]
            order = tuple(action for action in table.order[place] if action.stage == stage)
            last = stage + 1 == table.num_stages
            return StagePlacement(
                (devices[place],),
                turns(order, 1),
                last,
                lambda: () if last else (make(stage + 1),),
                place,
                receives=stage > 0 and table.devices[stage - 1][0] != place,
                returns=not last and table.devices[stage + 1][0] != place,
            )

        return (make(0),)

    def _after(self, rest: ClassCounts, num_used: int, stages: int | None) -> tuple[StagePlacement, ...]:
        """The slots that can come first on the devices that are left."""
        state = (self._rest(num_used, num_used - sum(rest)), stages, "free")
        most = self._most(sum(rest))
        made = []
        for group in product(*(range(min(count, most) + 1) for count in rest)):
            left = tuple(a - b for a, b in zip(rest, group, strict=True))
            if not 0 < sum(group) <= most or not self._ends_well(sum(left), stages):
                continue
            sorted_devices = tuple(c for c, count in enumerate(group) for _ in range(count))
            follow = partial(self._after, left, num_used, _fewer(stages))
            alike = None if self.arranged else (*state, tuple(sorted(zip(self.twins, group, left, strict=True))))
            for devices in sorted(set(permutations(sorted_devices))) if self.arranged else [sorted_devices]:
                key = (*state, rest, devices)
                made.append(self._make(key, devices, num_used, sum(rest), sum(left) == 0, follow, alike))
        return tuple(made)

    def _runs(self, rest: ClassCounts, num_used: int, stages: int | None) -> tuple[StagePlacement, ...]:
        key = (self._rest(num_used, num_used - len(rest)), stages, "runs", rest)
        made = []
        for size in range(1, self._most(len(rest)) + 1):
            if self._ends_well(len(rest) - size, stages):
                last = size == len(rest)
                devices = tuple(sorted(rest[:size]))
                follow = partial(self._runs, rest[size:], num_used, _fewer(stages))
                made.append(self._make((*key, size), devices, num_used, len(rest), last, follow, None))
        return tuple(made)

    def _make(
        self,
        key: Hashable,
        devices: ClassCounts,
        num_used: int,
        num_left: int,
        last: bool,
        follow: "Callable[[], tuple[StagePlacement, ...]]",
        alike: Hashable,
    ) -> StagePlacement:
        if key not in self._slots:
            order = self._order(num_used, num_used - num_left)
            self._slots[key] = StagePlacement(
                devices,
                self._shared(order, num_used, num_used - num_left, len(devices)),
                last,
                (lambda: ()) if last else follow,
                most_last=self._most(num_left - len(devices)),
                alike=alike,
            )
        return self._slots[key]

    def _most(self, num_left: int) -> int:
        return min(num_left, self.num_microbatches) if self.replicas else 1

    def _ends_well(self, num_left: int, stages: int | None) -> bool:
        return stages is None or (num_left == 0 if stages == 1 else num_left >= stages - 1)

    def _order(self, num_used: int, first: int) -> int:
        """A number for the order of a device in the table, the same where only the stage's own number differs."""
        if (num_used, first) not in self._numbers:
            actions = tuple((phase, m) for _, phase, m in self.table(num_used).order[first])
            self._numbers[num_used, first] = self._orders.setdefault(actions, len(self._orders))
        return self._numbers[num_used, first]

    def _rest(self, num_used: int, first: int) -> int:
        """A number for the table from a device on."""
        if first == num_used:
            return -1
        if (num_used, first) not in self._rests:
            rest = (self._order(num_used, first), self._rest(num_used, first + 1), "rest")
            self._rests[num_used, first] = self._orders.setdefault(rest, len(self._orders))
        return self._rests[num_used, first]

    def _shared(self, order: int, num_used: int, first: int, num_devices: int) -> StageSchedule:
        key = (order, num_devices)
        if key not in self._turns:
            self._turns[key] = turns(self.table(num_used).order[first], num_devices)
        return self._turns[key]


def _fewer(stages: int | None) -> int | None:
    return None if stages is None else stages - 1
