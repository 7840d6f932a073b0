"""Random numbers that do not depend on how a model is cut, nor on where a run was resumed."""

import hashlib
import random

import torch

from bapipe.runtime.materialize import layer_seed
from bapipe.tracing.python_random import set_generators


class PerOperatorRng:
    """Seeds the generator before every operator that draws random numbers, such as dropout.

    The seed is a hash of the run's seed, the step, the micro-batch and the operator's name. So an operator draws the
    same numbers on whichever rank it runs, in whichever order, and again when a forward is recomputed.

    Attributes:
        step, microbatch: what runs next; the step is set before it begins, the micro-batch by `enter`.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self.step = 0
        self.microbatch = 0

    def enter(self, microbatch: int) -> None:
        """Begins an action of a micro-batch, and seeds the generators of Python and numpy, from which layers may draw.

        An action that recomputes a forward seeds them as the forward did.
        """
        self.microbatch = microbatch
        set_generators(self._value(""))

    def __call__(self, operator: str) -> None:
        value = self._value(operator)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(value)
        else:
            torch.default_generator.manual_seed(value)

    def _value(self, operator: str) -> int:
        text = f"{self._seed}:{self.step}:{self.microbatch}:{operator}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1  # torch takes 63 bits


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seeds the global random number generators from (seed, rank, step), so that a resumed run draws the same."""
    value = layer_seed(seed, f"rank {rank} step {step}")
    torch.manual_seed(value)
    random.seed(value)
