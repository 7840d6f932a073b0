"""The judge: runs a schedule on paper, to the nanosecond, and adds up its memory."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from bapipe.cluster import Cluster
from bapipe.cost import Stage, stages_of
from bapipe.errors import InvalidSchedule
from bapipe.memory import peak_memory
from bapipe.plan import Plan
from bapipe.profile import ModelProfile
from bapipe.schedule import Action, Phase, Schedule, check
from bapipe.timeline import Span, Sync, Timeline, Transfer, Update


def simulate(plan: Plan, profiles: Mapping[str, ModelProfile]) -> Timeline:
    """Returns the predicted timeline of one step of a plan, with profiles by device kind.

    Raises:
        InvalidSchedule: the plan's order is incomplete, misplaced, or deadlocks.
        InvalidModel: the plan's layers are not the profiles' layers.
        BapipeError: a device kind or a micro-batch size without a profile.
    """
    stages = stages_of(plan.stages, profiles, plan.cluster, plan.microbatch_size)
    return judge(plan.table, stages, plan.cluster)


def judge(schedule: Schedule, stages: Sequence[Stage], cluster: Cluster) -> Timeline:
    """Returns the timeline of a schedule whose stages have known costs.

    Every action starts as early as its device's order and its inputs allow. A cut's tensors travel together, one
    transfer a link at a time in the order they become ready; zero bytes, or two stages on one device, take no time.
    O(n log n) for n actions.

    Raises:
        InvalidSchedule: the table is incomplete, misplaced, or deadlocks.
    """
    check(schedule)
    spans, transfers = _Engine(schedule, stages, cluster).run()
    syncs, synced_ns = _all_reduces(schedule, stages, cluster, spans)
    return Timeline(
        devices=tuple(device.name for device in cluster.devices),
        spans=tuple(span for rank in spans for span in rank),
        transfers=tuple(transfers),
        syncs=tuple(syncs),
        updates=tuple(_updates(schedule, stages, spans, synced_ns)),
        memory=peak_memory(schedule, stages),
    )


class _Engine:
    """The state of the step at one instant, and the events to come.

    At each instant: first all that ends, then transfers that can start, then actions that can start, until nothing
    changes. A transfer's key (ready time, sending stage, forward first, micro-batch) is its place in every queue.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[Stage], cluster: Cluster) -> None:
        self.schedule, self.stages, self.cluster = schedule, stages, cluster
        num_ranks = len(schedule.order)
        self.overlaps = [device.overlaps_transfers for device in cluster.devices]
        self.place = [0] * num_ranks  # next action of each rank
        self.idle = [True] * num_ranks
        self.arrived: set[tuple[int, bool, int]] = set()  # (stage, is forward, micro-batch)
        self.queues: dict[tuple[int, int], list[tuple[int, int, bool, int]]] = {}  # by (source, target)
        self.link_idle: dict[tuple[int, int], bool] = {}
        self.events: list[tuple[int, int, Span | Transfer]] = []
        self.spans: list[list[Span]] = [[] for _ in range(num_ranks)]
        self.transfers: list[Transfer] = []
        self.ready_ranks = set(range(num_ranks))
        self.ready_links: set[tuple[int, int]] = set()

    def run(self) -> tuple[list[list[Span]], list[Transfer]]:
        now, count = 0, 0
        while True:
            while self.events and self.events[0][0] == now:
                _, _, event = heappop(self.events)
                if isinstance(event, Span):
                    self.end_span(event)
                else:
                    self.end_transfer(event)
            started: list[Span | Transfer] = [*self.start_transfers(now), *self.start_spans(now)]
            for item in started:
                count += 1
                heappush(self.events, (item.end_ns, count, item))
            if not self.events:
                break
            now = self.events[0][0]
        self.check_all_ran()
        return self.spans, self.transfers

    def end_span(self, span: Span) -> None:
        self.idle[span.rank] = True
        self.wake(span.rank)
        stage, phase, _ = span.action
        if phase is Phase.FORWARD and stage + 1 < len(self.stages):
            self.hand_over(span, stage + 1, self.stages[stage].send_bytes)
        elif phase in (Phase.BACKWARD, Phase.INPUT_GRAD) and stage > 0:
            self.hand_over(span, stage - 1, self.stages[stage - 1].grad_bytes)

    def hand_over(self, span: Span, to_stage: int, num_bytes: int) -> None:
        stage, phase, microbatch = span.action
        forward = phase is Phase.FORWARD
        target = self.schedule.rank_of(to_stage, microbatch)
        if target == span.rank or num_bytes == 0:
            self.arrived.add((to_stage, forward, microbatch))
            self.ready_ranks.add(target)
            return
        link = (span.rank, target)
        heappush(self.queues.setdefault(link, []), (span.end_ns, stage, not forward, microbatch))
        self.ready_links.add(link)

    def end_transfer(self, transfer: Transfer) -> None:
        forward = transfer.phase is Phase.FORWARD
        link = (transfer.source, transfer.target)
        self.arrived.add((transfer.stage + (1 if forward else -1), forward, transfer.microbatch))
        self.link_idle[link] = True
        self.ready_links.add(link)
        self.ready_ranks.add(transfer.target)
        for rank in link:
            if not self.overlaps[rank]:
                self.idle[rank] = True
                self.wake(rank)

    def wake(self, rank: int) -> None:
        self.ready_ranks.add(rank)
        if not self.overlaps[rank]:
            self.ready_links |= {link for link in self.queues if rank in link}

    def start_transfers(self, now: int) -> list[Transfer]:
        if not self.ready_links:
            return []
        heads = [(self.queues[k][0], k) for k in self.ready_links if self.queues[k] and self.link_idle.get(k, True)]
        self.ready_links.clear()
        started = []
        for (_, stage, backward, microbatch), link in sorted(heads):
            held = [rank for rank in link if not self.overlaps[rank]]
            if not all(self.idle[rank] for rank in held):
                continue  # woken again when the device falls idle
            heappop(self.queues[link])
            self.link_idle[link] = False
            for rank in held:
                self.idle[rank] = False
            num_bytes = self.stages[stage - 1].grad_bytes if backward else self.stages[stage].send_bytes
            end_ns = now + self.cluster.link(*link).transfer_ns(num_bytes)
            phase = Phase.BACKWARD if backward else Phase.FORWARD
            started.append(Transfer(link[0], link[1], stage, phase, microbatch, now, end_ns))
        self.transfers += started
        return started

    def start_spans(self, now: int) -> list[Span]:
        started = []
        for rank in sorted(self.ready_ranks):
            order = self.schedule.order[rank]
            if not self.idle[rank] or self.place[rank] == len(order):
                continue
            action = order[self.place[rank]]
            if not self.inputs_are_here(action):
                continue
            replica = action.microbatch % len(self.stages[action.stage].on)
            end_ns = now + self.stages[action.stage].on[replica].ns(action.phase)
            span = Span(rank, action, now, end_ns)
            self.idle[rank] = False
            self.place[rank] += 1
            self.spans[rank].append(span)
            started.append(span)
        self.ready_ranks.clear()
        return started

    def inputs_are_here(self, action: Action) -> bool:
        # What the same stage did before is on the same device, so its order (checked) already says so.
        stage, phase, microbatch = action
        match phase:
            case Phase.FORWARD:
                return stage == 0 or (stage, True, microbatch) in self.arrived
            case Phase.WEIGHT_GRAD:
                return True
            case _:
                return stage == len(self.stages) - 1 or (stage, False, microbatch) in self.arrived

    def check_all_ran(self) -> None:
        waiting = {
            rank: order[self.place[rank]]
            for rank, order in enumerate(self.schedule.order)
            if self.place[rank] < len(order)
        }
        if waiting:
            stuck = ", ".join(f"rank {rank} at {action}" for rank, action in waiting.items())
            raise InvalidSchedule(f"deadlock: each waits for another: {stuck}")


def _all_reduces(
    schedule: Schedule, stages: Sequence[Stage], cluster: Cluster, spans: Sequence[Sequence[Span]]
) -> tuple[list[Sync], dict[int, int]]:
    """Returns every all-reduce, and when the last one of each stage with several devices ends."""
    syncs: list[Sync] = []
    synced_ns: dict[int, int] = {}
    for s, stage in enumerate(stages):
        end_ns = 0
        for bucket, num_bytes in enumerate(stage.bucket_bytes):
            ready_ns = max(_gradient_done_ns(s, stage, bucket, schedule, spans))
            start_ns = max(end_ns, ready_ns)
            end_ns = start_ns + _ring_ns(num_bytes, schedule.devices[s], cluster)
            syncs.append(Sync(s, bucket, num_bytes, start_ns, end_ns))
            synced_ns[s] = end_ns
    return syncs, synced_ns


def _gradient_done_ns(
    s: int, stage: Stage, bucket: int, schedule: Schedule, spans: Sequence[Sequence[Span]]
) -> list[int]:
    """When each device of a stage has the gradients of a bucket; 0 on one that has no micro-batch."""
    done = []
    for rank, cost in zip(schedule.devices[s], stage.on, strict=True):
        last = [x for x in spans[rank] if x.action.stage == s and x.action.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)]
        after_b, after_w = cost.gradient_done_ns[bucket]
        if not last:
            done.append(0)
        else:
            done.append(last[-1].start_ns + (after_w if last[-1].action.phase is Phase.WEIGHT_GRAD else after_b))
    return done


def _ring_ns(num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> int:
    """Ring all-reduce over the slowest link among `ranks`: 2(r-1) messages of a r-th of the bytes."""
    share = -(-num_bytes // len(ranks))
    slowest = max(cluster.link(a, b).transfer_ns(share) for a in ranks for b in ranks if a != b)
    return 2 * (len(ranks) - 1) * slowest


def _updates(
    schedule: Schedule, stages: Sequence[Stage], spans: Sequence[Sequence[Span]], synced_ns: Mapping[int, int]
) -> list[Update]:
    """A device that has run its actions updates its stages, one at a time, in the order they are synchronised."""
    updates = []
    for rank, ran in enumerate(spans):
        now = ran[-1].end_ns if ran else 0
        ready = []
        for s, ranks in enumerate(schedule.devices):
            if rank in ranks:
                own_end_ns = max((x.end_ns for x in ran if x.action.stage == s), default=0)
                ready.append((synced_ns.get(s, own_end_ns), s))
        for ready_ns, s in sorted(ready):
            start_ns = max(now, ready_ns)
            now = start_ns + stages[s].on[schedule.devices[s].index(rank)].update_ns
            updates.append(Update(rank, s, start_ns, now))
    return updates
