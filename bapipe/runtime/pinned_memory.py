"""Page-locked host memory for many tensors, to which a GPU can copy asynchronously.

torch allocates it in powers of two, and keeps freed blocks for reuse. A tensor alone would take up to twice its size,
so tensors share blocks.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bapipe.torch_device import is_out_of_memory

_ALIGNMENT = 512
_MIN_BLOCK_BYTES = 2**20

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Block:
    """A block of page-locked memory that holds several tensors.

    Attributes:
        num_bytes: its size, a power of two.
        used: bytes, from its start, that hold tensors.
        offsets: by the index of a tensor, the byte at which it begins.
    """

    num_bytes: int
    used: int = 0
    offsets: dict[int, int] = field(default_factory=dict)


def packed(sizes: Sequence[int]) -> list[Block]:
    """Returns blocks that hold tensors of the given sizes in bytes, by first fit decreasing (Johnson 1974).

    A new block is no larger than all tensors that are left together, unless the next one needs a larger one.
    """
    blocks: list[Block] = []
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    left = sum(aligned)
    for number in sorted(range(len(sizes)), key=lambda number: -aligned[number]):
        size = aligned[number]
        block = next((block for block in blocks if block.used + size <= block.num_bytes), None)
        if block is None:
            at_least = max(1 << max(size - 1, 0).bit_length(), _MIN_BLOCK_BYTES)
            block = Block(max(at_least, 1 << (left.bit_length() - 1)) if left else at_least)
            blocks.append(block)
        block.offsets[number] = block.used
        block.used += size
        left -= size
    return blocks


def host_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns uninitialized host tensors with the shapes and types of `tensors`, by name.

    Their memory is not page-locked if there is not enough of that: copies then make the host wait.
    """
    names = list(tensors)
    found: dict[str, Tensor] = {}
    for block in packed([tensors[name].nbytes for name in names]):
        memory = _page_locked(block.num_bytes)
        for number, offset in block.offsets.items():
            like = torch.empty_like(tensors[names[number]], device="meta")  # dense, in the same memory format
            part = memory[offset : offset + like.nbytes].view(like.dtype)
            found[names[number]] = part.as_strided(like.shape, like.stride())
    return {name: found[name] for name in names}


def _page_locked(num_bytes: int) -> Tensor:
    """Returns bytes in page-locked memory; in other memory, with a warning, if there is not enough."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    _log.warning(
        "%d MiB of page-locked memory are not available, so a GPU cannot copy a checkpoint in the background: the copy "
        "is slower, and training waits for it",
        num_bytes >> 20,
    )
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
