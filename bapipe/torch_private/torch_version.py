"""Which torch is installed."""

import inspect
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@cache
def is_before_2_13() -> bool:
    """Whether torch's stages lack what `older` adds."""
    from torch.distributed.pipelining.stage import _RecvInfo

    return "tensor_meta" not in inspect.signature(_RecvInfo).parameters
