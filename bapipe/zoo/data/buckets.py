"""Sentences of like lengths together, so that less padding is computed (Sutskever et al. 2014, arXiv:1409.3215)."""

from collections.abc import Sequence

from torch import Tensor

from bapipe.zoo.data.translation import Pair, Translations


class Bucketed(Translations):
    """Pairs of sentences that come in several lengths.

    Attributes:
        forms: of each length, the shapes of source, number of words, words before and words after; shortest first,
            the last is the data's own.
    """

    def __init__(self, pairs: Translations, num_buckets: int) -> None:
        """The lengths are such that about as many pairs fall into each."""
        self.pairs = pairs
        lengths = [pairs.lengths(index) for index in range(len(pairs))]
        longer = sorted(max(both) for both in lengths)
        (source,), _, (target,), _ = (tuple(part.shape) for part in (*pairs[0][0], pairs[0][1]))
        ends = {longer[len(longer) * k // num_buckets - 1] for k in range(1, num_buckets)}
        bounds = sorted({(min(end, source), min(end, target)) for end in ends} | {(source, target)})
        self.forms = tuple(((a,), (), (b,), (b,)) for a, b in bounds)
        self._form = [next(k for k, (a, b) in enumerate(bounds) if n <= a and m <= b) for n, m in lengths]

    @property
    def held_out(self) -> Translations | None:
        return self.pairs.held_out

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        return self.pairs[index]

    def form(self, index: int) -> int:
        """Returns the number of the shortest form that holds a pair."""
        return self._form[index]

    def lengths(self, index: int) -> tuple[int, int]:
        return self.pairs.lengths(index)

    def part(self, index: int, place: int) -> Tensor:
        return self.pairs.part(index, place)

    def text(self, words: Sequence[int]) -> str:
        return self.pairs.text(words)

    def reference(self, index: int) -> str:
        return self.pairs.reference(index)
