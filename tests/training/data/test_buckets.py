"""Sentences of similar lengths form mini-batches, no extra ones are left out, and only padding is cut off."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.data.buckets import bucketed_order
from bapipe.training.data.loader import batches
from bapipe.zoo.data.buckets import Bucketed
from bapipe.zoo.data.dataset import as_pipeline_dataset
from bapipe.zoo.data.open_dataset import bucketed
from bapipe.zoo.data.translation import PAD, translations
from tests.models.loading import rank_parts


def test_items_that_do_not_fill_a_mini_batch_go_to_the_next_bucket() -> None:
    numbers = [0, 1, 0, 2, 1, 0, 0, 0, 2, 1]
    order = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    # form 0 in that order: 7 6 5 | 2 0 left; form 1: 2 0 9 | 4 1 left; form 2: 4 1 8 | 3 left out
    found = bucketed_order(numbers, order, 3, torch.Generator().manual_seed(0))
    assert found[9:] == [3]
    assert {tuple(found[i : i + 3]) for i in range(0, 9, 3)} == {(7, 6, 5), (2, 0, 9), (4, 1, 8)}


@pytest.mark.parametrize("seed", range(20))
def test_every_item_occurs_once_in_a_batch_of_its_bucket(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(4, (50,), generator=generator).tolist()
    order = torch.randperm(50, generator=generator).tolist()
    found = bucketed_order(numbers, order, 6, generator)
    assert sorted(found) == list(range(50))
    largest = [max(numbers[i] for i in found[start : start + 6]) for start in range(0, 48, 6)]
    count = Counter(numbers)
    for form in range(4):  # as many whole mini-batches of forms up to this one as could be
        assert sum(number <= form for number in largest) == sum(count[k] for k in range(form + 1)) // 6
    assert largest != sorted(largest)


@pytest.fixture
def data(tmp_path: Path) -> Bucketed:
    """Sources of 1 to 8 words, whose translations have one word more, and one long translation."""
    sources = [" ".join("a" * n) for n in range(1, 9)] + ["a"]
    targets = [" ".join("b" * (n + 1)) for n in range(1, 9)] + [" ".join("b" * 9)]
    (tmp_path / "source.txt").write_text("\n".join(sources))
    (tmp_path / "target.txt").write_text("\n".join(targets))
    (tmp_path / "vocabulary.txt").write_text("a\nb\n")
    pairs = translations(str(tmp_path), vocabulary_size=6, source_length=8, target_length=10)
    return Bucketed(pairs, 3)


def test_buckets_have_the_quantiles_of_lengths(data: Bucketed) -> None:
    # the longer of both with its end: 3 4 5 6 7 8 9 10 10; a third are up to 5, a third up to 8
    assert data.bucket_shapes == (((5,), (), (5,), (5,)), ((8,), (), (8,), (8,)), ((8,), (), (10,), (10,)))
    assert [data.bucket_of(i) for i in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.part(8, 3).tolist() == [5] * 9 + [3]
    assert Bucketed(data.pairs, 1).bucket_shapes == data.bucket_shapes[-1:]


def test_mini_batches_are_cropped_to_their_bucket(data: Bucketed) -> None:
    asked = rank_parts("left", "right", "last", target=True, input_names=("left", "right", "last"), microbatch_size=1)
    feed = batches(asked, data, Position())
    seen = []
    for _ in range(4):
        batch = next(feed)
        assert batch.target is not None
        source, lengths, before = batch.inputs
        assert source is not None
        assert lengths is not None
        assert before is not None
        shapes = data.bucket_shapes[2 if batch.bucket is None else batch.bucket]
        assert [tuple(x.shape[1:]) for x in (source, lengths, before, batch.target)] == list(shapes)
        assert (source != PAD).sum(1).tolist() == lengths.tolist()
        assert ((batch.target == 3).sum(1) == 1).all()  # ends and all
        seen += lengths.tolist()
    assert len(seen) == 8
    assert not Counter(seen) - Counter([*range(1, 9), 1])


def test_only_sentences_have_lengths() -> None:
    data = as_pipeline_dataset([1])
    assert bucketed(data, 1, "mine") is data
    with pytest.raises(BapipeError) as error:
        bucketed(data, 2, "mine")
    assert str(error.value) == "data 'mine' are no sentences, so they cannot be put into 2 buckets by length"


def test_synthetic_sentences_have_lengths() -> None:
    data = translations("synthetic", vocabulary_size=9, source_length=6, target_length=7)
    (source, length, _), after = data[5]
    assert data.lengths(5) == (int(length), int((after != PAD).sum())) == (int((source != PAD).sum()), int(length) + 1)


def test_resuming_at_any_position_gives_the_same_batches(data: Bucketed) -> None:
    asked = rank_parts("left", input_names=("left", "right", "last"), microbatch_size=1)
    feed = batches(asked, data, Position())
    seen = [next(feed) for _ in range(9)]  # two passes and one more
    assert len({batch.bucket for batch in seen}) == 3
    for place in (0, 3, 4, 7):
        again = batches(asked, data, seen[place].after)
        for batch in seen[place + 1 :]:
            found = next(again)
            assert (found.bucket, found.after) == (batch.bucket, batch.after)
            assert found.inputs[0] is not None
            assert batch.inputs[0] is not None
            assert torch.equal(found.inputs[0], batch.inputs[0])
