"""Lower bounds on the step time of a chain of layers that is cut, and given devices, only in part.

Single letters here, for stage s: f, b times of F and of B = I + W; r the part of the backward that must end before the
stage before can begin its own (b, or I alone where the schedule splits it); x, y transfer times of its activations to
stage s+1 and of the gradients back; e what must follow its last r (W where it is apart, all-reduces, the update); n
micro-batches of one of its devices, M of all; d the depth of its order: F of micro-batch m+d follows r of m.
Where devices differ, times are the least. A step cannot be shorter than

  work    one device:  reach stage s, do all its work, synchronise, update:  sum_{i<s}(f+x) + n(f_s+b_s) + e_s;
          device k begins after the stages before have done F of micro-batch k
  return  one device:  reach stage s, do all its F and r, go back to a stage j <= s, finish there:
              sum_{i<s}(f+x) + n(f_s+r_s) + max_j(sum_{j<=i<s}(y+r) + e_j)
  link    one direction of one link, with one micro-batch going all the way before or after it
  depth   every d-th micro-batch goes all the way from stage s to the last stage and back before the next one can
  zigzag  single devices: F of m goes from stage i to stage s, where r of m-d_s+1 follows it; that comes back to
          stage i, where F of m-d_s+1+d_i follows it:
              sum_{i<=j<=s}(f+r) + sum_{i<=j<s}(x+y) for every d_i-d_s+1 micro-batches
  shared  devices with several stages: the most work of one of them, and the mean over all
  gpipe   a device of the last stage ends all its F, one of the last of all micro-batches among them, before its B; k
          micro-batches a device have passed any stage before that one, and n are to pass it after:
              sum(f+x) + max(k f, k x) + sum(b+y) + max((n-1)b, (n-1)y) + e_0

`Rest` gives, for a slot and every place in the chain, the least that this and all further stages can add when the
layers from there on are theirs; it comes from one dynamic programme over slots, last to first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bapipe.search.pieces import Piece, Pieces
from bapipe.search.slots import Slot
from bapipe.search.spans import BIG, Numbers


@dataclass(frozen=True, slots=True)
class Passed:
    """A stage of a prefix, and what was known of the prefix before it: its head, its tail, and its way."""

    num_devices: int
    depth: int
    forward_ns: int
    head_ns: int
    tail_ns: int
    way_ns: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first stages of a plan: which layers and where, and what is known of the step.

    Attributes:
        places: (0, ..., i): where the stages so far begin and end, as places of the grid.
        slots: of the stages so far, and of the next one.
        head_ns: when the first micro-batch can reach the next stage.
        tail_ns: what must follow the next stage's last r.
        first_tail_ns: the part of that which ends with the first stage's update.
        send_ns, return_ns: the largest of the stages' f and x, and r and y.
        bound_ns: least step time for the stages so far.
        way_ns: one micro-batch through the stages so far and back.
        passed: the stages so far.
        work_ns: where devices have several stages, F and B of all micro-batches placed on each so far.
    """

    places: tuple[int, ...]
    slots: tuple[Slot, ...]
    head_ns: int = 0
    tail_ns: int = 0
    first_tail_ns: int = 0
    send_ns: int = 0
    return_ns: int = 0
    bound_ns: int = 0
    way_ns: int = 0
    passed: tuple[Passed, ...] = ()
    work_ns: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all layers have their stage."""
        return len(self.places) > len(self.slots)


@dataclass(frozen=True, slots=True)
class Rest:
    """For every place, the least that a slot and those after it add.

    Attributes:
        path: one micro-batch all the way down and back.
        done: from the first F until all updates are done.
        load: from the first F until the last r of the slot.
        total: F and B of one micro-batch.
        send, back: the largest of k f and k x, and of (n-1)r and (n-1)y; for gpipe only.
    """

    path: Numbers
    done: Numbers
    load: Numbers
    total: Numbers
    send: Numbers
    back: Numbers


@dataclass(frozen=True, slots=True)
class _Step:
    """From a slot to the next: transfer times at every place, and how long the busiest link takes for all of them.

    `before` of them before the last stage's first B, `later` after another one: see gpipe above.
    """

    slot: Slot
    x: Numbers
    y: Numbers
    all_x: Numbers
    all_y: Numbers
    before: int
    later: int


class Bounds:
    """The bounds of one schedule and micro-batch size. A `Rest` takes O(places**2)."""

    def __init__(self, pieces: Pieces, num_microbatches: int, send: Numbers, grad: Numbers, *, gpipe: bool) -> None:
        self.pieces, self.num, self._send, self._grad, self._gpipe = pieces, num_microbatches, send, grad, gpipe
        self._rests: dict[int, tuple[Slot, Rest]] = {}
        self._steps: dict[int, tuple[Slot, tuple[_Step, ...]]] = {}

    def rest(self, slot: Slot) -> Rest:
        """Returns the least that a slot and those after it add, made when it is first asked for."""
        if id(slot) not in self._rests:
            self._rests[id(slot)] = slot, self._make(slot)
        return self._rests[id(slot)][1]

    def starts(self, first: tuple[Slot, ...], num_places: int) -> Iterator[tuple[int, Prefix]]:
        """Yields the empty plans that begin with each of some slots, and their bounds; none where nothing fits."""
        for slot in first:
            prefix = Prefix((0,), (slot,), work_ns=(0,) * num_places)
            bound = self._bound(prefix, slot)
            if bound < BIG:
                yield bound, prefix

    def children(self, prefix: Prefix) -> tuple[Numbers, Numbers, Numbers]:
        """Returns for every longer prefix its bound, its end, and its next slot by number, in no special order."""
        slot, start = prefix.slots[-1], prefix.places[-1]
        piece = self.pieces.row(slot, start)
        if slot.last:
            last = len(piece.fits) - 1
            own = self._own(prefix, piece, None, None)[last:]
            bounds = np.where(piece.fits[last:], np.maximum(own, prefix.bound_ns), BIG)
            return bounds, np.array([self.pieces.grid.num_places - 1]), np.array([-1])
        places = np.arange(start + 1, start + 1 + len(piece.fits))
        rows = [np.where(piece.fits, self._child(prefix, piece, step, start + 1), BIG) for step in self._next(slot)]
        numbers = np.repeat(np.arange(len(rows)), len(places))
        return np.concatenate(rows), np.tile(places, len(rows)), numbers

    def extend(self, prefix: Prefix, place: int, number: int) -> Prefix:
        """Returns the prefix with one more stage that ends at a place, and the next slot by number."""
        slot, start = prefix.slots[-1], prefix.places[-1]
        piece = self.pieces.row(slot, start)
        j = place - start - 1
        step = None if slot.last else self._next(slot)[number]
        x, y = (0, 0) if step is None else (int(step.x[place]), int(step.y[place]))
        f, r, e = int(piece.forward[j]), int(piece.back[j]), int(piece.after[j])
        rest = None if step is None else self.rest(step.slot)
        own = self._own(prefix, piece, step, rest, start + 1)
        work = prefix.work_ns
        if slot.place is not None:
            added = work[slot.place] + self.num * int(piece.both[j])
            work = (*work[: slot.place], added, *work[slot.place + 1 :])
        passed = Passed(len(slot.devices), slot.turns.depth, f, prefix.head_ns, prefix.tail_ns, prefix.way_ns)
        return Prefix(
            places=(*prefix.places, place),
            slots=prefix.slots if step is None else (*prefix.slots, step.slot),
            head_ns=prefix.head_ns + f + x,
            tail_ns=y + r + max(e, prefix.tail_ns),
            first_tail_ns=y + r + (prefix.first_tail_ns if start > 0 else e),
            send_ns=max(prefix.send_ns, self._before(slot) * f, 0 if step is None else step.before * x),
            return_ns=max(prefix.return_ns, self._later(slot) * r, 0 if step is None else step.later * y),
            bound_ns=max(prefix.bound_ns, int(own[j])),
            way_ns=prefix.way_ns + f + r + x + y,
            passed=(*prefix.passed, passed),
            work_ns=work,
        )

    def _own(self, prefix: Prefix, piece: Piece, step: _Step | None, rest: Rest | None, first: int = 0) -> Numbers:
        """The least step time that the next stage alone asks for, with each of its runs of layers."""
        after = np.maximum(piece.after, prefix.tail_ns)
        busy = piece.turn
        around = piece.forward + piece.back
        if step is not None and rest is not None:
            x, y, path = step.x[first:], step.y[first:], rest.path[first:]
            linked = around + path + np.maximum(step.all_x[first:] + y, x + step.all_y[first:])
            around = around + path + x + y
            busy = np.maximum(busy, linked)
        rounds = (self.num - 1) // prefix.slots[-1].turns.depth + 1
        busy = np.maximum(busy, np.minimum(rounds * np.minimum(around, BIG // rounds), BIG))
        own = busy + after
        for k, work in piece.work:
            fed = max((k // stage.num_devices * stage.forward_ns for stage in prefix.passed), default=0)
            own = np.maximum(own, work + fed)
        own = prefix.head_ns + own
        if len(prefix.slots[-1].devices) == 1:
            for stage in prefix.passed:
                own = np.maximum(own, self._zigzag(prefix, stage, piece.forward + piece.back, around))
        return _keep(own)

    def _zigzag(self, prefix: Prefix, stage: Passed, here: Numbers, around: Numbers) -> Numbers | int:
        """The least step time from an earlier stage to the next one of the prefix and back, again and again."""
        first = prefix.slots[-1].turns.least_depth - 1
        ahead = stage.depth - first
        if stage.num_devices > 1 or ahead < 1 or first >= self.num:
            return 0
        rounds = (self.num - 1 - first) // ahead
        way = prefix.way_ns - stage.way_ns
        start = stage.head_ns + first * stage.forward_ns + way + stage.tail_ns
        total: Numbers = start + rounds * np.minimum(way + here, BIG // max(rounds, 1)) + around
        return total

    def _child(self, prefix: Prefix, piece: Piece, step: _Step, first: int) -> Numbers:
        rest = self.rest(step.slot)
        x, y = step.x[first:], step.y[first:]
        own = self._own(prefix, piece, step, rest, first)
        head = prefix.head_ns + piece.forward + x
        tail = y + piece.back + np.maximum(piece.after, prefix.tail_ns)
        bound = np.maximum(
            np.maximum(own, prefix.bound_ns), head + np.maximum(rest.done[first:], rest.load[first:] + tail)
        )
        slot = prefix.slots[-1]
        if slot.place is not None:
            here = prefix.work_ns[slot.place] + self.num * piece.both
            total = sum(prefix.work_ns) + self.num * np.minimum(piece.both + rest.total[first:], BIG // self.num)
            bound = np.maximum(bound, np.maximum(here, total // len(prefix.work_ns)))
        if self._gpipe:
            send = np.maximum(self._before(slot) * piece.forward, step.before * x)
            back = np.maximum(self._later(slot) * piece.back, step.later * y)
            send = np.maximum(np.maximum(rest.send[first:], prefix.send_ns), send)
            back = np.maximum(np.maximum(rest.back[first:], prefix.return_ns), back)
            own_tail = piece.after if prefix.places[-1] == 0 else prefix.first_tail_ns
            bound = np.maximum(bound, head + rest.path[first:] + y + piece.back + own_tail + send + back)
        return _keep(bound)

    def _bound(self, prefix: Prefix, slot: Slot) -> int:
        rest = self.rest(slot)
        bound = int(max(rest.done[0], rest.load[0]))
        if prefix.work_ns:
            bound = max(bound, min(BIG, self.num * int(rest.total[0])) // len(prefix.work_ns))
        if self._gpipe and rest.path[0] < BIG:
            bound = max(bound, int(rest.path[0] + rest.send[0] + rest.back[0]))
        return min(bound, BIG)

    def _last(self, slot: Slot) -> int:
        """Devices that the last stage has at most."""
        return len(slot.devices) if slot.last else slot.most_last

    def _before(self, slot: Slot) -> int:
        """Micro-batches that a device has passed on before one of the last ones."""
        return max(0, (self.num - self._last(slot)) // len(slot.devices))

    def _later(self, slot: Slot) -> int:
        return -(-self.num // len(slot.devices)) - 1

    def _next(self, slot: Slot) -> tuple[_Step, ...]:
        if id(slot) not in self._steps:
            steps = []
            for other in slot.next:
                x, all_x = self.pieces.transfers(slot, other, self._send, forward=True)
                y, all_y = self.pieces.transfers(slot, other, self._grad, forward=False)
                links = int(np.lcm(len(slot.devices), len(other.devices)))
                before = max(0, (self.num - self._last(slot)) // links)
                steps.append(_Step(other, x, y, all_x, all_y, before, -(-self.num // links) - 1))
            self._steps[id(slot)] = slot, tuple(steps)
        return self._steps[id(slot)][1]

    def _make(self, slot: Slot) -> Rest:
        grid = self.pieces.grid
        piece = self.pieces.all(slot, slice(None))
        size = grid.num_places
        f, r = piece.forward, piece.back
        if slot.last:
            zero = np.full(size, BIG, dtype=np.int64)
            zero[-1] = 0
            x_path = x_done = x_load = x_total = x_send = x_back = zero
            linked = zero
        else:
            steps = [(step, self.rest(step.slot)) for step in self._next(slot)]
            if not steps:
                return Rest(*[np.full(size, BIG, dtype=np.int64)] * 6)
            x_path = _least([s.x + s.y + rest.path for s, rest in steps])
            x_done = _least([s.x + rest.done for s, rest in steps])
            x_load = _least([s.x + s.y + rest.load for s, rest in steps])
            x_total = _least([rest.total for _, rest in steps])
            linked = _least([rest.path + np.maximum(s.all_x + s.y, s.x + s.all_y) for s, rest in steps])
            x_send = x_back = x_total
            if self._gpipe:
                x_send = _least([np.maximum(s.before * s.x, rest.send) for s, rest in steps])
                x_back = _least([np.maximum(s.later * s.y, rest.back) for s, rest in steps])
        ends = grid.ends
        reach = x_path[ends]
        fits = piece.fits & (reach < BIG)
        around = f + r + reach
        rounds = (self.num - 1) // slot.turns.depth + 1
        load = np.maximum(piece.turn, f + r + np.maximum(x_load, linked)[ends])
        load = np.maximum(load, rounds * np.minimum(around, BIG // rounds))
        work = _most([work for _, work in piece.work])
        done = np.maximum(np.maximum(work, load + piece.after), f + x_done[ends])
        return Rest(
            path=_keep(grid.least(np.where(fits, around, BIG))),
            done=_keep(grid.least(np.where(fits, done, BIG))),
            load=_keep(grid.least(np.where(fits, load, BIG))),
            total=_keep(grid.least(np.where(fits, piece.both + x_total[ends], BIG))),
            send=self._flow(fits, self._before(slot) * f, x_send),
            back=self._flow(fits, self._later(slot) * r, x_back),
        )

    def _flow(self, fits: Numbers, own: Numbers, others: Numbers) -> Numbers:
        if not self._gpipe:
            return others
        grid = self.pieces.grid
        return _keep(grid.least(np.where(fits, np.maximum(own, others[grid.ends]), BIG)))


def _least(values: list[Numbers]) -> Numbers:
    return _keep(np.minimum.reduce(values))


def _most(values: list[Numbers]) -> Numbers:
    found: Numbers = np.maximum.reduce(values)
    return found


def _keep(values: Numbers) -> Numbers:
    found: Numbers = np.minimum(values, BIG)
    return found
