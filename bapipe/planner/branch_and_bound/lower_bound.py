"""Lower bounds on the step time of a chain of layers that is cut, and given devices, only in part.

Single letters here, for stage s: f, b times of F and of B = I + W; r the part of the backward that must end before the
stage before can begin its own (b, or I alone where the schedule splits it); x, y transfer times of its activations to
stage s+1 and of the gradients back; e what must follow its last r (W where it is apart, all-reduces, the update); n
micro-batches of one of its devices, M of all; d the depth of its order: F of micro-batch m+d follows r of m.
Where devices differ, times are the least. On devices that do not overlap, f and r contain their transfers where these
must be over, too. A step cannot be shorter than

  work    one device:  reach stage s, do all its work, synchronise, update:  sum_{i<s}(f+x) + n(f_s+b_s) + e_s;
          device k begins after the stages before have done F of micro-batch k
  return  one device:  reach stage s, do all its F and r, go back to a stage j <= s, finish there:
              sum_{i<s}(f+x) + n(f_s+r_s) + max_j(sum_{j<=i<s}(y+r) + e_j)
  link    one direction of one link, with one micro-batch going all the way before or after it
  around  one micro-batch all the way from stage s to the last stage and back, then all r but the first, and the F
          that can only follow it
  last    F of the last micro-batch reaches stage s no earlier than any stage before it lets go of it, then goes all
          the way and back to any stage j, which finishes. Stage i lets go of it when
            - its device has done its F of the micro-batches before, and r of those up to M-d_i
            - every d-th micro-batch before it has gone all the way from stage i to the last stage and back, in turn
            - zigzag: F of m goes from stage i to stage s, where r of m-a_s follows it, a_s being the most that its F
              are always ahead; that comes back to stage i, where F of m-a_s+d_i follows it, and so on
  shared  devices with several stages: the most work of one of them, and the mean over all
  gpipe   a device of the last stage ends all its F, one of the last of all micro-batches among them, before its B; k
          micro-batches a device have passed any stage before that one: F takes sum(f+x) + max(k f, k x). From there on
          it is as if only B were left: one micro-batch goes back to stage s, the others' r follow, then go back to j

`CostToGo` gives, for a slot and every place in the chain, the least that this and all further stages can add when the
layers from there on are theirs; it comes from one dynamic programme over slots, last to first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.branch_and_bound.cost_to_go import CostToGo, CostToGoTable, Transitions
from bapipe.planner.branch_and_bound.intervals import INF, IntArray
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.stage_bound import StageBound, TransferStalls, bound_stage, keep, maximum
from bapipe.planner.branch_and_bound.stage_candidates import StageCandidates, StageCostTable


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage of a prefix, and what was known of the prefix before it: its way."""

    num_devices: int
    depth: int
    forward_ns: int
    way_ns: int


@dataclass(frozen=True, slots=True)
class PartialPlan:
    """The first stages of a plan: which layers and where, and what is known of the step.

    Attributes:
        places: (0, ..., i): where the stages so far begin and end, as places of the grid.
        slots: of the stages so far, and of the next one.
        head_ns: when the first micro-batch can reach the next stage.
        feed_ns: when the last micro-batch can.
        tail_ns: what must follow the next stage's last r.
        back_ns: what must follow its first r where nothing but B is left.
        send_ns: what the F of all micro-batches add to those of the first one.
        enter_ns, leave_ns: the last x and y.
        bound_ns: least step time for the stages so far.
        way_ns: one micro-batch through the stages so far and back.
        passed: the stages so far.
        work_ns: where devices have several stages, F and B of all micro-batches placed on each so far.
    """

    places: tuple[int, ...]
    slots: tuple[StagePlacement, ...]
    head_ns: int = 0
    feed_ns: int = 0
    tail_ns: int = 0
    back_ns: int = 0
    send_ns: int = 0
    enter_ns: int = 0
    leave_ns: int = 0
    bound_ns: int = 0
    way_ns: int = 0
    passed: tuple[PlacedStage, ...] = ()
    work_ns: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all layers have their stage."""
        return len(self.places) > len(self.slots)


@dataclass(frozen=True, slots=True)
class _NextStage:
    """The next stage of a prefix: what it takes, when it begins the last micro-batch, and the step time it asks for."""

    stay: StageBound
    start: IntArray
    step: IntArray


class LowerBound:
    """The bounds of one schedule and micro-batch size. A `CostToGo` takes O(places**2)."""

    def __init__(
        self,
        pieces: StageCostTable,
        num_microbatches: int,
        send: IntArray,
        grad: IntArray,
        *,
        gpipe: bool,
        limits_ns: Sequence[int] = (),
    ) -> None:
        self.pieces, self.num, self._gpipe = pieces, num_microbatches, gpipe
        self.rests = CostToGoTable(pieces, num_microbatches, send, grad, (), gpipe=gpipe)
        self._fine = CostToGoTable(pieces, num_microbatches, send, grad, limits_ns, gpipe=gpipe)

    def starts(self, first: tuple[StagePlacement, ...], num_places: int) -> Iterator[tuple[int, PartialPlan]]:
        """Yields the empty plans that begin with each of some slots, and their bounds; none where nothing fits."""
        for slot in first:
            prefix = PartialPlan((0,), (slot,), work_ns=(0,) * num_places)
            bound = self._bound(prefix, self.rests.rest(slot))
            if bound < INF:
                yield bound, prefix

    def children(self, prefix: PartialPlan) -> tuple[IntArray, IntArray, IntArray]:
        """Returns for every longer prefix its bound, its end, and its next slot by number, in no special order."""
        slot, start = prefix.slots[-1], prefix.places[-1]
        piece = self.pieces.row(slot, start)
        if slot.last:
            last = piece.only(len(piece.fits) - 1)
            own = self._own(prefix, last, None)
            bounds = np.maximum(own.step, prefix.bound_ns)
            if self._gpipe:
                head, _, _, send, back = self._longer(prefix, last, own, None)
                bounds = np.maximum(bounds, head + send + back)
            return (
                np.where(last.fits, keep(bounds), INF).ravel(),
                np.array([self.pieces.grid.num_places - 1]),
                np.array([-1]),
            )
        steps = self._fine.steps(slot)
        if steps is None:
            none = np.zeros(0, dtype=np.int64)
            return none, none, none
        places = np.arange(start + 1, start + 1 + len(piece.fits))
        bounds = self._child(prefix, piece, steps.at(slice(None), slice(start + 1, None)))
        least = bounds.reshape(len(slot.next), self._fine.num_classes, len(places)).min(axis=1)
        numbers = np.repeat(np.arange(len(slot.next)), len(places))
        return np.where(piece.fits, least, INF).ravel(), np.tile(places, len(slot.next)), numbers

    def extend(self, prefix: PartialPlan, place: int, number: int) -> PartialPlan:
        """Returns the prefix with one more stage that ends at a place, and the next slot by number."""
        slot, start = prefix.slots[-1], prefix.places[-1]
        piece = self.pieces.row(slot, start).only(place - start - 1)
        steps = None if slot.last else self.rests.steps(slot)
        if steps is not None:
            steps = steps.at(slice(number, number + 1), slice(place, place + 1))
        own = self._own(prefix, piece, steps)
        x, y = (0, 0) if steps is None else (int(steps.x[0, 0]), int(steps.y[0, 0]))
        f, r = int(piece.forward[0]), int(piece.back[0])
        head, tail, feed, send, back = (int(value.flat[0]) for value in self._longer(prefix, piece, own, steps))
        work = prefix.work_ns
        if slot.place is not None:
            added = work[slot.place] + self.num * int(piece.both[0])
            work = (*work[: slot.place], added, *work[slot.place + 1 :])
        return PartialPlan(
            places=(*prefix.places, place),
            slots=prefix.slots if steps is None else (*prefix.slots, slot.next[number]),
            head_ns=head,
            feed_ns=feed,
            tail_ns=tail,
            back_ns=back,
            send_ns=send,
            enter_ns=x,
            leave_ns=y,
            bound_ns=max(prefix.bound_ns, int(own.step.flat[0])),
            way_ns=prefix.way_ns + f + r + x + y,
            passed=(*prefix.passed, PlacedStage(len(slot.devices), slot.turns.depth, f, prefix.way_ns)),
            work_ns=work,
        )

    def _own(self, prefix: PartialPlan, piece: StageCandidates, steps: Transitions | None) -> _NextStage:
        """What the next stage alone asks for, with each of its runs of layers."""
        slot = prefix.slots[-1]
        reach: IntArray | int = 0
        linked: IntArray | int = 0
        onward: IntArray = piece.forward
        if steps is not None:
            x, y, path = steps.x, steps.y, steps.rest.path
            reach, linked = x + y + path, path + np.maximum(steps.all_x + y, x + steps.all_y)
            onward = piece.forward + x + steps.rest.last
        own = bound_stage(slot, self.num, piece, reach, linked, self._held(prefix, steps))
        after = np.maximum(piece.after, prefix.tail_ns)
        start = np.maximum(prefix.head_ns + own.start, prefix.feed_ns)
        for stage in prefix.passed:
            start = np.maximum(start, self._zigzag(prefix, stage, piece.forward + piece.back))
        asked = [start + np.maximum(own.around + after, onward)]
        asked += [prefix.head_ns + own.load + piece.after, prefix.head_ns + own.left + prefix.tail_ns]
        for k, work in own.work:
            fed = max((k // stage.num_devices * stage.forward_ns for stage in prefix.passed), default=0)
            asked.append(prefix.head_ns + fed + work)
        return _NextStage(own, start, keep(maximum(asked)))

    def _held(self, prefix: PartialPlan, steps: Transitions | None) -> TransferStalls:
        if not self.pieces.stalls(prefix.slots[-1]):
            return TransferStalls()
        send, take = (0, 0) if steps is None else (steps.x, steps.y)
        return TransferStalls(prefix.enter_ns, prefix.leave_ns, send, take)

    def _zigzag(self, prefix: PartialPlan, stage: PlacedStage, here: IntArray) -> IntArray | int:
        """When the last micro-batch reaches the next stage that goes there and back from an earlier one, in turn."""
        first = prefix.slots[-1].turns.ahead
        ahead = stage.depth - first
        if ahead < 1 or first >= self.num:
            return 0
        rounds, extra = divmod(self.num - 1 - first, ahead)
        around = np.minimum(prefix.way_ns - stage.way_ns + here, INF // max(rounds, 1))
        waits = (first + extra) // stage.num_devices * stage.forward_ns
        start: IntArray = prefix.head_ns + waits + rounds * around
        return start

    def _longer(
        self, prefix: PartialPlan, piece: StageCandidates, own: _NextStage, steps: Transitions | None
    ) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        """Returns head, tail, feed, send and back of the longer prefixes."""
        f, r, e, tail = piece.forward, piece.back, piece.after, prefix.tail_ns
        x, y = (np.zeros((1, 1), dtype=np.int64),) * 2 if steps is None else (steps.x, steps.y)
        most = 0 if steps is None else steps.most
        head = prefix.head_ns + f + x
        feed = np.maximum(own.start + f + x, head + most * x)
        after = np.maximum(e, tail)
        send = back = np.zeros(1, dtype=np.int64)
        if self._gpipe:
            before = 0 if steps is None else steps.before * x
            send = np.maximum(np.maximum(self.rests.before(prefix.slots[-1]) * f, before), prefix.send_ns)
            back = y + maximum([r + self._again(prefix, piece, own), r + most * y + after, piece.spent])
        return head, y + r + after, feed, send, back

    def _again(self, prefix: PartialPlan, piece: StageCandidates, own: _NextStage) -> IntArray:
        """What must follow the first r of the next stage where nothing but B is left."""
        most = -(-self.num // len(prefix.slots[-1].devices)) - 1
        leave = most * prefix.leave_ns if self.pieces.stalls(prefix.slots[-1]) else 0
        again = own.stay.again
        return maximum([again + piece.after, again + leave + prefix.tail_ns, np.array(prefix.back_ns)])

    def _child(self, prefix: PartialPlan, piece: StageCandidates, steps: Transitions) -> IntArray:
        own = self._own(prefix, piece, steps)
        rest = steps.rest
        head, tail, feed, send, back = self._longer(prefix, piece, own, steps)
        bound = maximum(
            [
                np.maximum(own.step, prefix.bound_ns),
                head + np.maximum(rest.done, rest.load + tail),
                feed + np.maximum(rest.last, rest.path + tail),
            ]
        )
        slot = prefix.slots[-1]
        if slot.place is not None:
            here = prefix.work_ns[slot.place] + self.num * piece.both
            total = sum(prefix.work_ns) + self.num * np.minimum(piece.both + rest.total, INF // self.num)
            bound = np.maximum(bound, np.maximum(here, total // len(prefix.work_ns)))
        if self._gpipe:
            later = maximum([rest.back_done, rest.back_load + tail, rest.path + back])
            bound = np.maximum(bound, head + later + np.maximum(rest.send, send))
        return keep(bound)

    def _bound(self, prefix: PartialPlan, rest: CostToGo) -> int:
        bound = int(max(rest.done[0, 0], rest.load[0, 0]))
        if prefix.work_ns:
            bound = max(bound, min(INF, self.num * int(rest.total[0, 0])) // len(prefix.work_ns))
        if self._gpipe and rest.path[0, 0] < INF:
            bound = max(bound, int(rest.back_done[0, 0] + rest.send[0, 0]))
        return min(bound, INF)
