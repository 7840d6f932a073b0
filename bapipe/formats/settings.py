"""How a model is computed, where that changes its times and bytes."""

from typing import Literal

import msgspec

from bapipe.errors import BapipeError
from bapipe.units import Positive


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was chosen when a model was measured; a run computes so too, or its plan is not for it.

    Attributes:
        dtype: type of the parameters.
        optimizer: the rule of the update.
        threads: compute threads of a rank on a CPU.
        autocast: the type that `torch.autocast` computes in, None without it.
        channels_last: whether images lie in memory channel by channel for each pixel.
        tf32: whether CUDA devices may round float32 factors to 10 bits.
    """

    dtype: str = "float32"
    optimizer: str = "sgd-momentum"
    threads: Positive = 1
    autocast: Literal["bfloat16", "float16"] | None = None
    channels_last: bool = False
    tf32: bool = False


def check_same(planned: Settings, run: Settings) -> None:
    """Raises BapipeError where a run computes in another way than the profile its plan was made from."""
    if found := difference(planned, run):
        raise BapipeError(
            f"the plan is for a model that was measured with {found[0]}; this run computes with {found[1]}: profile "
            "with the settings of the run, and plan again"
        )


def difference(a: Settings, b: Settings) -> tuple[str, str] | None:
    """Returns the first setting that differs, in words, such as ("threads 2", "threads 1"); None where none does."""
    for name in Settings.__struct_fields__:
        mine, other = getattr(a, name), getattr(b, name)
        if mine != other:
            return _words(name, mine), _words(name, other)
    return None


def _words(name: str, value: object) -> str:
    if name == "autocast" and value is None:
        return "no autocast"
    return f"{name.replace('_', ' ')} {str(value).lower()}"
