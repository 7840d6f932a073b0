"""Settings of a computation that change its times and bytes: data types, optimizer, threads, memory format."""

from typing import Annotated, Literal

import msgspec

from bapipe.errors import BapipeError
from bapipe.field_types import check_fields
from bapipe.optimizers import OPTIMIZERS
from bapipe.units import Positive


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings with which a model was measured. A run must use the same ones, or its plan does not hold.

    Attributes:
        dtype: the data type of the parameters.
        optimizer: the optimizer, such as `sgd-momentum`.
        threads: the number of compute threads of a rank on a CPU.
        autocast: the data type of `torch.autocast`; None without it.
        channels_last: whether images use torch's channels-last memory format.
        tf32: whether CUDA devices may multiply float32 matrices in TF32 precision.

    Raises:
        BapipeError: a value of another type, or out of range.
    """

    dtype: Annotated[str, msgspec.Meta(examples=["float32", "bfloat16"])] = "float32"
    optimizer: Annotated[str, msgspec.Meta(examples=[*OPTIMIZERS])] = "sgd-momentum"
    threads: Positive = 1
    autocast: Literal["bfloat16", "float16"] | None = None
    channels_last: bool = False
    tf32: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def check_same(planned: Settings, run: Settings, remedy: str = "") -> None:
    """Raises BapipeError if the settings of a run differ from those of the profile that its plan was made from.

    Args:
        remedy: what else may be done, "... or "; the error says it first.
    """
    if found := difference(planned, run):
        raise BapipeError(
            f"the plan is for a model that was measured with {found[0]}; this run computes with {found[1]}: {remedy}"
            "profile with the settings of the run, and plan again"
        )


def check_same_optimizer(planned: Settings, rule: str, remedy: str) -> None:
    """Raises as `check_same` if a run has another optimizer than the profile, by the names that profiles have."""
    check_same(planned, msgspec.structs.replace(planned, optimizer=rule), remedy)


def difference(a: Settings, b: Settings) -> tuple[str, str] | None:
    """Returns the first setting that differs, in words, such as ("threads 2", "threads 1"); None if none differs."""
    for name in Settings.__struct_fields__:
        mine, other = getattr(a, name), getattr(b, name)
        if mine != other:
            return _words(name, mine), _words(name, other)
    return None


def _words(name: str, value: object) -> str:
    if name == "autocast" and value is None:
        return "no autocast"
    return f"{name.replace('_', ' ')} {str(value).lower()}"
