"""What ranks use of mini-batches."""

from bapipe.training.data.loader import RankParts


def rank_parts(
    *needs: str,
    target: bool = False,
    input_names: tuple[str, ...] = ("left", "right"),
    microbatches: tuple[int, ...] = (0, 1),
    microbatch_size: int = 2,
) -> RankParts:
    """A rank that uses some inputs of a model, and perhaps the target, of mini-batches of two micro-batches."""
    parts = [name in needs for name in input_names] + [target]
    return RankParts(
        seed=3,
        num_inputs=len(input_names),
        places=tuple(place for place, used in enumerate(parts) if used),
        microbatches=microbatches,
        microbatch_size=microbatch_size,
        minibatch_size=2 * microbatch_size,
    )
