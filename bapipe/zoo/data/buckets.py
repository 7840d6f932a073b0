"""Groups sentences of similar lengths, so that less padding is computed (Sutskever et al. 2014, arXiv:1409.3215)."""

from collections.abc import Sequence

from bapipe.zoo.data.dataset import BucketShape
from bapipe.zoo.data.translation import Pair, Translations


class Bucketed(Translations):
    """Pairs of sentences in buckets by length.

    The shapes of a bucket are those of source, its number of words, target input and target; shortest first; the last
    bucket has the maximum lengths of the data.
    """

    def __init__(self, pairs: Translations, num_buckets: int) -> None:
        """Lengths are quantiles, so that buckets hold about the same number of pairs."""
        self.pairs = pairs
        lengths = [pairs.lengths(index) for index in range(len(pairs))]
        longer = sorted(max(both) for both in lengths)
        (source,), _, (target,), _ = (tuple(part.shape) for part in (*pairs[0][0], pairs[0][1]))
        ends = {longer[len(longer) * k // num_buckets - 1] for k in range(1, num_buckets)}
        bounds = sorted({(min(end, source), min(end, target)) for end in ends} | {(source, target)})
        self._bucket_shapes = tuple(((a,), (), (b,), (b,)) for a, b in bounds)
        self._buckets = [next(k for k, (a, b) in enumerate(bounds) if n <= a and m <= b) for n, m in lengths]

    @property
    def held_out(self) -> Translations | None:
        return self.pairs.held_out

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        return self.pairs[index]

    @property
    def bucket_shapes(self) -> tuple[BucketShape, ...]:
        return self._bucket_shapes

    def bucket_of(self, index: int) -> int:
        return self._buckets[index]

    def lengths(self, index: int) -> tuple[int, int]:
        return self.pairs.lengths(index)

    def text(self, words: Sequence[int]) -> str:
        return self.pairs.text(words)

    def reference(self, index: int) -> str:
        return self.pairs.reference(index)
