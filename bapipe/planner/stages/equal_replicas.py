"""Equal numbers of devices per stage, for naive pipelines: on all devices, half of them, a quarter and so on."""

from collections.abc import Sequence

from bapipe.planner.stages.placements import StagePlacement


def halves(number: int) -> list[int]:
    """Returns the number, half of it, a quarter and so on, rounded down, to one; [] for zero."""
    return [number >> halvings for halvings in range(number.bit_length())]


def doublings(most: int) -> list[int]:
    """Returns the powers of two up to `most`, and `most` itself, ascending."""
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def pipeline_with_replicas(first: Sequence[StagePlacement], num_replicas: int) -> tuple[StagePlacement, ...] | None:
    """Returns the first pipeline with `num_replicas` replicas in every stage, None if there is none.

    Args:
        first: the possible placements of its first stage.
    """
    path: list[StagePlacement] = []
    while not path or not path[-1].is_last:
        choices = path[-1].successors if path else first
        match = next((placement for placement in choices if placement.num_replicas == num_replicas), None)
        if match is None:
            return None
        path.append(match)
    return tuple(path)
