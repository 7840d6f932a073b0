"""What a loader of batches reads from a pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The attributes of a pipeline and its plan that `batches` uses."""

    needs: tuple[str, ...]
    needs_target: bool
    input_names: tuple[str, ...] = ("left", "right")
    microbatches: tuple[int, ...] = (0, 1)
    minibatch_size: int = 4
    microbatch_size: int = 2
