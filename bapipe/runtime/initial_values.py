"""Checks that all processes begin with the same values, because each stage takes those of its own process."""

import hashlib
import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.job.groups import gathered
from bapipe.runtime.tensor_changes import content
from bapipe.tracing.model import persistent_state

_log = logging.getLogger(__name__)

_NUM_SAMPLED = 16
"""Number of values of a tensor that are compared, evenly spread over it."""


def warn_of_unlike_values(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Warns if a parameter or buffer differs between processes, as after only one of them has loaded a checkpoint.

    All processes of the group must call it together. Tensors on the meta device are left out.
    """
    state = persistent_state(module).items()
    own = {name: _digest(tensor) for name, tensor in state if not tensor.is_meta and tensor.layout == torch.strided}
    digests = gathered(own, group)
    unlike = sorted(name for name in own if len({each[name] for each in digests if name in each}) > 1)
    if unlike:
        _log.warning(
            "processes have different values of %d parameters and buffers, such as '%s', and each stage begins with "
            "those of its own process: build the module under the same seed in all processes, and load files in each",
            len(unlike),
            unlike[0],
        )


def _digest(tensor: Tensor) -> bytes:
    num = tensor.numel()
    places = torch.linspace(0, max(0, num - 1), min(_NUM_SAMPLED, num), dtype=torch.float64).long()
    indices = torch.unravel_index(places.to(tensor.device), tensor.shape) if tensor.dim() else ...
    return hashlib.sha256(content(tensor.detach()[indices])).digest()[:8]
