"""What a foreign profile does not say about itself."""

from dataclasses import dataclass

from bapipe.optimizers import OPTIMIZERS

NUM_OPTIMIZER_STATES = {name: rule.state_values for name, rule in OPTIMIZERS.items()}
"""Values of optimizer state for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a foreign profile comes from.

    Attributes:
        model, source: what the profile calls the model, and where its figures are from.
        kind, device_name, memory_bytes: the device it was measured on.
        batch_size: samples in the pass that was measured.
        sizes: micro-batch sizes of the profile; figures at other sizes than `batch_size` are scaled in proportion.
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
