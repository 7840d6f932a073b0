"""Random numbers that do not depend on how a model is cut, nor on where a run was resumed."""

import hashlib

import torch

from bapipe.module_state.python_random import seed_all_generators, seed_cpu_generators, set_generators
from bapipe.schedules.table import Action


def derived_seed(seed: int, what: str) -> int:
    """Returns the seed for one of the things that a run draws: a layer's initial values, an epoch's order, an item."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{what}".encode()).digest()[:7])


class PerOperatorRng:
    """Seeds the generators before every operator that draws random numbers, such as dropout, and before the loss.

    The seed is a hash of the run's seed, the step, the micro-batch and the operator's name. So an operator draws the
    same numbers on whichever rank it runs, in whichever order, and again when a forward is recomputed. For operators of
    torch only its own generators are seeded; other code may also draw from those of Python and numpy.

    Attributes:
        step, microbatch: those that run; the step is set before it begins, the micro-batch by `enter`.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self.step = 0
        self.microbatch = 0

    def for_evaluation(self) -> "PerOperatorRng":
        """Returns one that draws other numbers, whose micro-batches are counted over all of an evaluation."""
        return PerOperatorRng(derived_seed(self._seed, "evaluation"), self._device)

    def enter(self, action: Action) -> None:
        """Begins an action, and seeds all generators for code that draws in its backward, such as a hook."""
        self.microbatch = action.microbatch
        self(str(action), True)

    def enter_loss(self) -> None:
        """Begins the loss of the micro-batch, and seeds all generators for it."""
        self("(loss)", True)  # no operator has such a name

    def __call__(self, operator: str, other_code: bool) -> None:
        """Seeds torch's generators for an operator; those of Python and numpy too if it runs `other_code`."""
        value = self._value(operator)
        if other_code:
            set_generators(value)
        torch.default_generator.manual_seed(value)  # also on a GPU: a layer may draw on the CPU whether to skip itself
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(value)

    def _value(self, operator: str) -> int:
        text = f"{self._seed}:{self.step}:{self.microbatch}:{operator}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1  # torch takes 63 bits


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seeds the global random number generators from (seed, rank, step), so that a resumed run draws the same."""
    value = derived_seed(seed, f"rank {rank} step {step}")
    seed_all_generators(value)


def seed_item(seed: int, data: str, index: int | None) -> None:
    """Seeds the global random number generators of the CPU for an item of data; None is for what all items share.

    Each rank loads by itself those parts of an item that it uses, so all ranks must draw the same. `data` names what
    `index` counts: the items of an epoch of the training data, or of the held-out data.
    """
    seed_cpu_generators(derived_seed(seed, f"{data} item {index}"))
