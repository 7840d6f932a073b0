"""Schedules compiled to columns of integers: compiled once, timed many times by the three engines.

Every F, B and I produces one message per micro-batch, and every F, B and I consumes at most one: the activations that
a stage sends forwards, and the gradients that it sends backwards. With M micro-batches, the messages are numbered

    2s * M + m          produced by F of stage s; consumed by F of stage s + 1 or, for the last stage, by its own B or I
    (2s + 1) * M + m    produced by B or I of stage s; consumed by B or I of stage s - 1

so the numbers ascend in the order in which transfers that become ready at once take a link: lower stage first, then
forward before backward, then lower micro-batch.

Everything else that an action depends on (`bapipe.schedules.table.dependencies`) comes before it on its lane. A lane is
a sequence of actions that run one at a time: a device has one lane, or two if it runs forward and backward side by
side. Lanes 0 to R - 1 are those of the ranks; behind them come the backward lanes of the ranks that have two.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, compress
from operator import itemgetter
from typing import Any, NamedTuple

from bapipe.errors import InvalidSchedule
from bapipe.schedules.table import Action, Phase, Schedule, check, stages_of_ranks

_PHASE_INDEX = {phase: i for i, phase in enumerate(Phase)}
NUM_PHASES = len(_PHASE_INDEX)
NUM_SPECIAL_MESSAGES = 3
"""Behind the real messages: one that is there from the start, one that never comes, and one that nobody consumes."""


class Channel(NamedTuple):
    """The transfers of one stage, in one direction, between two ranks."""

    source: int
    target: int
    stage: int
    forward: bool


class TransferColumns(NamedTuple):
    """All transfers: the channel and the message of each, and the first five fields of a `Transfer`, in columns."""

    channels: tuple[int, ...]
    messages: tuple[int, ...]
    fields: tuple[Sequence[Any], ...]


@dataclass(frozen=True, kw_only=True)
class CompiledSchedule:
    """A legal schedule in a sequence in which every action comes after all that it depends on.

    Attributes:
        actions, ranks: the actions, and the rank of each.
        durations: of each action, the index of its time among those of every phase of every replica of every stage.
        consumes, produces: of each action, the messages.
        channel_of: of each action, the channel that carries what it produces; -1 if that stays on the device, or if
            nothing is produced.
        channels: the channels, in the order in which actions first use them.
        num_ranks: ranks of the schedule.
        num_messages: messages, with the special ones.
        side_by_side: the ranks that have a lane of their own for backwards, in the order of these lanes.
        lanes_side_by_side: the lane of each action if there are such ranks, else empty.
    """

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    durations: tuple[int, ...]
    consumes: tuple[int, ...]
    produces: tuple[int, ...]
    channel_of: tuple[int, ...]
    channels: tuple[Channel, ...]
    num_ranks: int
    num_messages: int
    side_by_side: tuple[int, ...] = ()
    lanes_side_by_side: tuple[int, ...] = ()

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lane of each action."""
        return self.lanes_side_by_side or self.ranks

    @property
    def lane_ranks(self) -> tuple[int, ...]:
        """The rank of each lane."""
        return (*range(self.num_ranks), *self.side_by_side)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The ordered pairs of ranks between which transfers go."""
        return tuple(dict.fromkeys((channel.source, channel.target) for channel in self.channels))

    @cached_property
    def channel_links(self) -> tuple[int, ...]:
        """The link of each channel, an index of `links`."""
        number = {link: i for i, link in enumerate(self.links)}
        return tuple(number[channel.source, channel.target] for channel in self.channels)

    @cached_property
    def may_queue(self) -> tuple[bool, ...]:
        """For each channel, whether its transfers may have to queue behind others.

        The transfers of a channel alone on its link become ready in the order of its lane. If micro-batches ascend in
        that order, then so do the messages of transfers that become ready at once, and no transfer overtakes another.
        """
        latest: dict[int, int] = {}
        descends = set()
        for channel, message in zip(self.channel_of, self.produces, strict=True):
            if channel >= 0 and message < latest.get(channel, 0):
                descends.add(channel)
            latest[channel] = message
        num_channels = Counter(self.channel_links)
        return tuple(num_channels[link] > 1 or channel in descends for channel, link in enumerate(self.channel_links))

    @cached_property
    def durations_before_queues(self) -> frozenset[int]:
        """The durations of the actions whose transfers may have to queue."""
        columns = zip(self.durations, self.channel_of, strict=True)
        return frozenset(duration for duration, channel in columns if channel >= 0 and self.may_queue[channel])

    @cached_property
    def message_channels(self) -> list[int]:
        """The channel that carries each message, -1 if none does."""
        channels = [-1] * self.num_messages
        for channel, message in zip(self.channel_of, self.produces, strict=True):
            channels[message] = channel
        return channels

    @cached_property
    def consumer_lanes(self) -> list[int]:
        """The lane that consumes each message, -1 if none does."""
        consumers = [-1] * self.num_messages
        for lane, message in zip(self.lanes, self.consumes, strict=True):
            consumers[message] = lane
        return consumers

    @cached_property
    def lane_positions(self) -> tuple[tuple[int, ...], ...]:
        """Where each lane's actions are among all actions, in its order."""
        return tuple(map(tuple, _positions(self.lanes, len(self.lane_ranks))))

    @cached_property
    def lane_actions(self) -> tuple[tuple[Action, ...], ...]:
        """Each lane's actions, in its order."""
        return tuple(tuple(map(self.actions.__getitem__, lane)) for lane in self.lane_positions)

    @cached_property
    def lane_durations(self) -> tuple[tuple[int, ...], ...]:
        """The durations of each lane's actions, in its order."""
        return tuple(tuple(map(self.durations.__getitem__, lane)) for lane in self.lane_positions)

    @cached_property
    def transfers(self) -> TransferColumns:
        """All transfers, in columns."""
        sends = [channel >= 0 for channel in self.channel_of]
        channels, messages = (tuple(compress(column, sends)) for column in (self.channel_of, self.produces))
        microbatches = [microbatch for _, _, microbatch in compress(self.actions, sends)]
        facts = [(c.source, c.target, c.stage, Phase.FORWARD if c.forward else Phase.BACKWARD) for c in self.channels]
        of_channels = (tuple(map(itemgetter(i), facts)) for i in range(4))
        fields = [tuple(map(of_channel.__getitem__, channels)) for of_channel in of_channels]
        return TransferColumns(channels, messages, (*fields, microbatches))


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """When each action of a compiled schedule ends, each message arrives, and each lane has run its actions."""

    ends_ns: list[int]
    arrivals_ns: list[int]
    lane_ends_ns: list[int]

    def rank_ends_ns(self, compiled: CompiledSchedule) -> list[int]:
        """Returns when each rank has run its actions."""
        ends_ns = self.lane_ends_ns[:]
        for lane in range(len(ends_ns) - 1, compiled.num_ranks - 1, -1):
            rank = compiled.lane_ranks[lane]
            ends_ns[rank] = max(ends_ns[rank], ends_ns.pop())
        return ends_ns


_Row = tuple[Action, int, int, int, int, int]
"""An action, its lane, its duration, the messages it consumes and produces, and its channel."""


@lru_cache(maxsize=8)
def compile_schedule(schedule: Schedule, side_by_side: tuple[int, ...] = ()) -> CompiledSchedule:
    """Returns a schedule as columns; the ranks in `side_by_side` run forward and backward on two lanes.

    O(n) for n actions.

    Raises:
        InvalidSchedule: the table is incomplete, misplaced, or deadlocks.
    """
    check(schedule)
    num_ranks = len(schedule.order)
    backward_lanes = {rank: num_ranks + i for i, rank in enumerate(sorted(side_by_side))}
    lane_ranks = (*range(num_ranks), *backward_lanes)
    num_messages = 2 * schedule.num_stages * schedule.num_microbatches + NUM_SPECIAL_MESSAGES
    channels: dict[Channel, int] = {}
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [])
    first_duration = list(accumulate((NUM_PHASES * len(ranks) for ranks in schedule.devices), initial=0))
    for rank, own_stages in enumerate(stages_of_ranks(schedule)):
        rows = _rows(schedule, rank, backward_lanes.get(rank, rank), own_stages, first_duration, channels)
        for column, of_rank in zip(columns, zip(*rows, strict=True), strict=False):  # a rank may have no rows
            column += of_rank
    sequence = _in_sequence(columns, lane_ranks, num_messages)
    actions, lanes, durations, consumes, produces, channel_of = (
        tuple(map(column.__getitem__, sequence)) for column in columns
    )
    return CompiledSchedule(
        actions=actions,
        ranks=tuple(map(lane_ranks.__getitem__, lanes)),
        durations=durations,
        consumes=consumes,
        produces=produces,
        channel_of=channel_of,
        channels=tuple(channels),
        num_ranks=num_ranks,
        num_messages=num_messages,
        side_by_side=tuple(backward_lanes),
        lanes_side_by_side=lanes if backward_lanes else (),
    )


def permute_compiled(compiled: CompiledSchedule, ranks: Sequence[int], num_ranks: int) -> CompiledSchedule:
    """Returns the compiled form of `permute_ranks(schedule, ranks, num_ranks)` without compiling again.

    Actions and their dependencies do not depend on the numbers of ranks; only ranks and the ends of channels do.
    """
    # The lists of actions, needs and products stay: only their ranks are renumbered.
    return replace(
        compiled,
        ranks=tuple([ranks[rank] for rank in compiled.ranks]),
        channels=tuple(
            channel._replace(source=ranks[channel.source], target=ranks[channel.target])
            for channel in compiled.channels
        ),
        num_ranks=num_ranks,
    )


def _rows(
    schedule: Schedule,
    rank: int,
    backward_lane: int,
    own_stages: Sequence[int],
    first_duration: Sequence[int],
    channels: dict[Channel, int],
) -> Iterator[_Row]:
    """Yields the actions of a rank, and numbers the channels that it meets.

    The compiled form of `bapipe.schedules.table.dependencies`: the message that an action consumes is what its
    dependency on another stage produces; on the last stage, a backward consumes what its own F produces.
    """
    num, last, devices = schedule.num_microbatches, schedule.num_stages - 1, schedule.devices
    available = 2 * num * (last + 1)
    # Of each stage and phase: lane, duration, the messages of micro-batch 0, their steps from one micro-batch to the
    # next, the ranks that its messages go to, and the channels to these.
    rules: dict[tuple[int, Phase], tuple[int, int, int, int, int, int, tuple[int, ...], dict[int, int]]] = {}
    for s in own_stages:
        duration = first_duration[s] + NUM_PHASES * devices[s].index(rank)
        after, before = devices[s + 1] if s < last else (), devices[s - 1] if s else ()
        consumes, step = ((2 * s - 2) * num, 1) if s else (available, 0)
        rules[s, Phase.FORWARD] = rank, duration, consumes, step, 2 * s * num, 1, after, {}
        consumes, produces = (2 * s + 3 if s < last else 2 * s) * num, (2 * s + 1) * num
        for phase in (Phase.BACKWARD, Phase.INPUT_GRAD):
            own = duration + _PHASE_INDEX[phase]
            rules[s, phase] = backward_lane, own, consumes, 1, produces, 1, before, {}
        own = duration + _PHASE_INDEX[Phase.WEIGHT_GRAD]
        rules[s, Phase.WEIGHT_GRAD] = backward_lane, own, available, 0, available + 2, 0, (), {}
    for action in schedule.order[rank]:
        s, phase, m = action
        lane, duration, consumes, step, produces, produced_step, targets, known = rules[s, phase]
        channel = -1
        if targets:
            target = targets[m % len(targets)]
            if target != rank:
                if target not in known:
                    known[target] = channels.setdefault(Channel(rank, target, s, phase is Phase.FORWARD), len(channels))
                channel = known[target]
        yield action, lane, duration, consumes + step * m, produces + produced_step * m, channel


def _positions(lanes: Sequence[int], num_lanes: int) -> list[list[int]]:
    """Returns where each lane's actions are, by the lane of each action."""
    positions: list[list[int]] = [[] for _ in range(num_lanes)]
    for position, lane in enumerate(lanes):
        positions[lane].append(position)
    return positions


def _in_sequence(columns: Sequence[Sequence[Any]], lane_ranks: Sequence[int], num_messages: int) -> list[int]:
    """Returns the actions of all lanes, each after what it consumes (Kahn 1962, one lane as far as it goes).

    Raises:
        InvalidSchedule: they deadlock.
    """
    actions, lane_of, _, consumes, produces, _ = columns
    lanes = _positions(lane_of, len(lane_ranks))
    produced = bytearray(num_messages)
    produced[num_messages - NUM_SPECIAL_MESSAGES] = 1
    waiting: dict[int, int] = {}  # the lane that waits for each message
    remaining = [iter(lane) for lane in lanes]
    heads = [next(lane, -1) for lane in remaining]
    ready = list(range(len(lanes)))
    sequence: list[int] = []
    while ready:
        lane = ready.pop()
        head = heads[lane]
        while head >= 0:
            if not produced[consumes[head]]:
                waiting[consumes[head]] = lane
                break
            sequence.append(head)
            message = produces[head]
            produced[message] = 1
            if message in waiting:
                ready.append(waiting.pop(message))
            head = next(remaining[lane], -1)
        heads[lane] = head
    if waiting:
        stuck = ", ".join(f"rank {lane_ranks[lane]} at {actions[head]}" for lane, head in enumerate(heads) if head >= 0)
        raise InvalidSchedule(f"deadlock: each waits for another: {stuck}")
    return sequence
