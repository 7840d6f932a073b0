"""Metrics of a model's output, and scores of texts that it generates."""

from collections.abc import Sequence

from torch import Tensor

from bapipe.errors import BapipeError


def top_1(scores: Tensor, classes: Tensor) -> Tensor:
    """Returns for each sample 1 if its class has the highest score, else 0; scores are [n, classes]."""
    return (scores.argmax(dim=1) == classes).float()


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Returns the BLEU of texts, 0 to 100, with sacrebleu's default tokenizer and smoothing (Post 2018).

    Raises:
        BapipeError: sacrebleu is not installed.
    """
    try:
        import sacrebleu  # not needed for training
    except ImportError:
        raise BapipeError(
            "BLEU is computed with sacrebleu, which is not installed: pip install sacrebleu, or train without "
            "`evaluate_every`"
        ) from None
    score: float = sacrebleu.corpus_bleu(list(texts), [list(references)], force=True).score
    return score
