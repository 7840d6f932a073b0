"""The judge's general clockwork, event after event: for links that stages share, and devices that cannot overlap."""

from collections.abc import Sequence
from heapq import heappop, heappush

from bapipe.cluster import Cluster
from bapipe.cost import Stage
from bapipe.schedule import Action, Phase, Schedule
from bapipe.timeline import Span, Transfer


class Engine:
    """The state of a step at one instant, and the events to come.

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
