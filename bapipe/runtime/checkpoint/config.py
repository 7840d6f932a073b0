"""Where and how often checkpoints are written."""

from dataclasses import dataclass
from pathlib import Path

from bapipe.errors import BapipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where and how often checkpoints are written; there is always one after the last step.

    Attributes:
        every: steps between two checkpoints.
        keep: how many of the newest checkpoints are kept.
        resume: whether to continue from the newest one, if there is one.
    """

    folder: Path
    every: int = 100
    keep: int = 3
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise BapipeError(f"a checkpoint every {self.every} steps, {self.keep} kept: want 1 or more of each")
