"""How a model is measured: the options of `bapipe.profile` that measuring passes on."""

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.errors import BapipeError
from bapipe.formats.settings import Settings
from bapipe.optimizers import OPTIMIZERS, unknown_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How a model is measured.

    Attributes:
        microbatch_sizes: numbers of samples to measure at; they become ascending, each once.
        settings: how the model is computed; their `dtype` is replaced by the module's.
        seconds_per_size, target_spread: measuring at a size ends when the time of every layer that matters has this
            relative spread, or after about this time.
        leaf_modules, operator_layers: which modules and operators are layers, see `bapipe.tracing.layers.trace`.
        layer_by_layer: measures one layer at a time, see `measure_isolated`. Otherwise layers are measured in passes of
            the whole model, unless its parameters and their gradients do not fit on the device.
        exhaustive: measures every layer, also those that are equal to another one.
        check: compares the split model with the original, see `bapipe.equivalence`; not done `layer_by_layer`.

    Raises:
        BapipeError: no micro-batch size, one below 1, a number instead of several, or an unknown optimizer.
    """

    microbatch_sizes: Sequence[int] = (1, 2, 4, 8)
    settings: Settings = Settings()  # noqa: RUF009
    seconds_per_size: float = 12.0
    target_spread: float = 0.03
    leaf_modules: Sequence[str] = ()
    operator_layers: bool = False
    layer_by_layer: bool = False
    exhaustive: bool = False
    check: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "microbatch_sizes", _checked_sizes(self.microbatch_sizes))
        if self.settings.optimizer not in OPTIMIZERS:
            raise unknown_optimizer(self.settings.optimizer, OPTIMIZERS, "`settings=bapipe.Settings(optimizer=...)`")


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if isinstance(sizes, int):
        raise BapipeError(f"`microbatch_sizes` is {sizes}: want a list of sizes, such as [{sizes}]")
    if not sizes:
        raise BapipeError("no micro-batch size to measure at: give one or more, such as 1,2,4,8")
    if min(sizes) < 1:
        raise BapipeError(f"micro-batch size {min(sizes)} cannot be measured: want 1 or more")
    return tuple(sorted(set(sizes)))
