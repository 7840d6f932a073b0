"""Places a compiled schedule on other ranks, without compiling it again."""

from collections.abc import Sequence
from dataclasses import replace

from bapipe.simulator.compiled import CompiledSchedule


def permute_compiled(compiled: CompiledSchedule, ranks: Sequence[int], num_ranks: int) -> CompiledSchedule:
    """Returns the compiled form of `permute_ranks(schedule, ranks, num_ranks)` without compiling again.

    Actions and their dependencies do not depend on the numbers of ranks; only ranks and the ends of channels do.
    """
    # The lists of actions, needs and products stay: only their ranks are renumbered.
    return replace(
        compiled,
        ranks=tuple([ranks[rank] for rank in compiled.ranks]),
        channels=tuple(
            channel._replace(source=ranks[channel.source], target=ranks[channel.target])
            for channel in compiled.channels
        ),
        num_ranks=num_ranks,
    )
