"""The facts about an imported profile that its file does not contain."""

from dataclasses import dataclass

from bapipe.optimizers import OPTIMIZERS

NUM_OPTIMIZER_STATES = {name: rule.state_values for name, rule in OPTIMIZERS.items()}
"""Values of optimizer state for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportMetadata:
    """Where an imported profile comes from.

    Attributes:
        model, source: the model's name in the profile, and where its figures are from.
        kind, device_name, memory_bytes: the device it was measured on.
        batch_size: samples in the measured pass.
        sizes: micro-batch sizes of the profile; figures at sizes other than `batch_size` are scaled in proportion.
        optimizer: one of `NUM_OPTIMIZER_STATES`.
    """

    model: str
    source: str
    kind: str
    device_name: str
    memory_bytes: int
    batch_size: int
    sizes: tuple[int, ...]
    optimizer: str
