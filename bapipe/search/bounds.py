"""Lower bounds on the step time of a chain that is cut only in part.

Single letters here, for stage s: f, b times of F and of B, or of I + W if that is shorter and the schedule splits; r
the part of the backward that must end before the stage before can begin its own (b, or I alone where the schedule
splits it), w what must then follow on the stage itself (nothing, or the rest of b); x, y transfer times of its
activations to stage s+1 and of the gradients back; u its update; M micro-batches. A step cannot be shorter than

  work    one device:  reach stage s, do all its work, update:  sum_{i<s}(f+x) + M(f_s+b_s) + u_s
  return  one device:  reach stage s, do all its F and r, go back to a stage j <= s, finish there:
              sum_{i<s}(f+x) + M(f_s+r_s) + max_j(sum_{j<=i<s}(y+r) + w_j + u_j)
  link    one direction of one link, with one micro-batch going all the way before or after it
  shared  devices with several stages: the most work of one of them, and the mean over all
  gpipe   all F before all B, each a flow shop:
              sum(f+x) + (M-1)max(f, x) + sum(b+y) + (M-1)max(b, y) + u_0

The `Rest` tables give, for every stage s and layer a, the least that stages s, s+1, ... can add when they hold the
layers a, a+1, ...; they come from one dynamic programme over the stages, last to first.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from bapipe.search.problem import Problem


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first stages of a plan: where they end, and what is known of the step.

    Attributes:
        cuts: (0, ..., a): the layers before a are placed.
        head_ns: when the first micro-batch can reach the next stage.
        tail_ns: what must follow the next stage's last backward.
        first_tail_ns: the part of that which ends with the first stage's update.
        send_ns, return_ns: the largest of the stages' f and x, and b and y.
        bound_ns: least step time for the stages so far.
        work_ns: where devices have several stages, F and B of all micro-batches placed on each so far.
    """

    cuts: tuple[int, ...]
    head_ns: int = 0
    tail_ns: int = 0
    first_tail_ns: int = 0
    send_ns: int = 0
    return_ns: int = 0
    bound_ns: int = 0
    work_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A stage that holds certain layers: its f, b, r, w, x, y and u."""

    f: int
    b: int
    r: int
    w: int
    x: int
    y: int
    u: int


class Bounds:
    """The `Rest` tables of one problem. Building them takes O(stages * layers**2)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._pieces: dict[tuple[int, int, int], Piece | None] = {}
        p, n = problem.num_stages, problem.num_layers
        self._path = [[inf] * (n + 1) for _ in range(p + 1)]
        self._work = [[inf] * (n + 1) for _ in range(p + 1)]
        self._load = [[inf] * (n + 1) for _ in range(p + 1)]
        self._sum = [[inf] * (n + 1) for _ in range(p + 1)]
        self._send = [[inf] * (n + 1) for _ in range(p + 1)]
        self._return = [[inf] * (n + 1) for _ in range(p + 1)]
        for table in (self._path, self._work, self._load, self._sum, self._send, self._return):
            table[p][n] = 0
        for s in reversed(range(p)):
            for a in range(s, n):
                self._fill(s, a)

    def piece(self, s: int, a: int, z: int) -> Piece | None:
        """Returns stage s with the layers a to z, or None where its device cannot hold them."""
        key = (s, a, z)
        if key not in self._pieces:
            self._pieces[key] = self._make(s, a, z)
        return self._pieces[key]

    def ends(self, s: int, a: int) -> Sequence[int]:
        """Returns where stage s can end when it begins at layer a."""
        p, n = self.problem.num_stages, self.problem.num_layers
        cuts = self.problem.legal_cuts
        return (n,) if s == p - 1 else cuts[bisect_right(cuts, a) : len(cuts) - (p - 2 - s)]

    def start(self) -> Prefix:
        return Prefix((0,), work_ns=(0,) * len(self.problem.ranks) if self.problem.looped else ())

    def extend(self, prefix: Prefix, z: int) -> Prefix | None:
        """Returns the prefix with one more stage that ends at layer z, or None where that does not fit."""
        s, a = len(prefix.cuts) - 1, prefix.cuts[-1]
        piece = self.piece(s, a, z)
        if piece is None:
            return None
        f, b, r, x, y = piece.f, piece.b, piece.r, piece.x, piece.y
        num = self.problem.num_microbatches
        path = self._path[s + 1][z]
        if path == inf:
            return None
        own_end = piece.w + piece.u
        after = max(own_end, prefix.tail_ns)
        link = f + r + path + max(num * x + y, x + num * y)
        here = max(num * (f + b) + piece.u, max(num * (f + r), link) + after)
        return Prefix(
            cuts=(*prefix.cuts, z),
            head_ns=prefix.head_ns + f + x,
            tail_ns=y + r + after,
            first_tail_ns=y + r + (prefix.first_tail_ns if s > 0 else own_end),
            send_ns=max(prefix.send_ns, f, x),
            return_ns=max(prefix.return_ns, r, y),
            bound_ns=int(max(prefix.bound_ns, prefix.head_ns + here)),
            work_ns=_added(prefix.work_ns, self.problem.places[s], num * (f + b)),
        )

    def bound_ns(self, prefix: Prefix) -> float:
        """Returns a time that no completion of the prefix beats; infinite where none fits."""
        s, a = len(prefix.cuts) - 1, prefix.cuts[-1]
        rest = max(self._work[s][a], self._load[s][a] + prefix.tail_ns)
        bound = max(prefix.bound_ns, prefix.head_ns + rest)
        if prefix.work_ns:
            total = sum(prefix.work_ns) + self.problem.num_microbatches * self._sum[s][a]
            bound = max(bound, *prefix.work_ns, total // len(prefix.work_ns))
        if self.problem.schedule == "gpipe":
            more = max(prefix.send_ns, self._send[s][a]) + max(prefix.return_ns, self._return[s][a])
            path = prefix.head_ns + self._path[s][a] + prefix.first_tail_ns
            bound = max(bound, path + (self.problem.num_microbatches - 1) * more)
        return bound

    def _make(self, s: int, a: int, z: int) -> Piece | None:
        problem = self.problem
        place = problem.places[s]
        if problem.peak_bytes(s, a, z) > problem.memory_bytes[place]:
            return None
        cost = problem.chains[place].cost(a, z)
        x, y = problem.transfer_ns(s, z)
        b = cost.least_backward_ns if problem.splits_backward else cost.backward_ns
        r = min(cost.input_grad_ns, b) if problem.splits_backward else b
        return Piece(cost.forward_ns, b, r, b - r, x, y, cost.update_ns)

    def _fill(self, s: int, a: int) -> None:
        num = self.problem.num_microbatches
        for z in self.ends(s, a):
            path, piece = self._path[s + 1][z], self.piece(s, a, z)
            if piece is None or path == inf:
                continue
            f, b, r, x, y = piece.f, piece.b, piece.r, piece.x, piece.y
            through = f + r + x + y
            link = f + r + path + max(num * x + y, x + num * y)
            load = max(num * (f + r), through + self._load[s + 1][z], link)
            self._path[s][a] = min(self._path[s][a], through + path)
            self._work[s][a] = min(self._work[s][a], max(num * (f + b), f + x + self._work[s + 1][z]))
            self._load[s][a] = min(self._load[s][a], load)
            self._sum[s][a] = min(self._sum[s][a], f + b + self._sum[s + 1][z])
            self._send[s][a] = min(self._send[s][a], max(f, x, self._send[s + 1][z]))
            self._return[s][a] = min(self._return[s][a], max(r, y, self._return[s + 1][z]))


def _added(work_ns: tuple[int, ...], place: int, more_ns: int) -> tuple[int, ...]:
    return (*work_ns[:place], work_ns[place] + more_ns, *work_ns[place + 1 :]) if work_ns else ()
