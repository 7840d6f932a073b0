"""The index of the tensors in a checkpoint/1, a pickle: only names and places are read, nothing is imported or called.

Every class that an index holds is replaced by a record of its state, and any other name is refused.
"""

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.tensor_files import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor is: the bytes of a file that begin at `offset`."""

    name: str
    file: str
    offset: int
    num_bytes: int


def read_index(content: bytes) -> Iterator[TensorPlace]:
    """Yields the places of the tensors that an index lists.

    Raises:
        BapipeError: it names a class that no index holds.
        Exception: it is damaged; of any kind, as reading a pickle may raise.
    """
    for key, value in _IndexReader(io.BytesIO(content)).load().state["storage_data"].items():
        name, place = key.state["fqn"], value.state
        yield TensorPlace(
            name=name, file=str(place["relative_path"]), offset=int(place["offset"]), num_bytes=int(place["length"])
        )


class _Record:
    """Stands for an object of the index, of which only the state is read."""

    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _unread(*_: object) -> None:
    """Stands for a value that is not needed."""


_METADATA = "torch.distributed.checkpoint.metadata"

_NAMES: dict[tuple[str, str], Any] = {
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "Metadata"): _Record,
    (_METADATA, "MetadataIndex"): _Record,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "TensorStorageMetadata"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _unread,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _unread,
    ("pathlib", "PosixPath"): _unread,
    ("pathlib._local", "PosixPath"): _unread,
    ("torch", "Size"): tuple,
    **{("torch", name): name for name in DTYPES},
}
"""What each name that an index holds is replaced by."""


class _IndexReader(pickle._Unpickler):
    """Reads the index of tensors of a checkpoint/1; imports nothing.

    Python's unpickler is used, not the one in C, whose memo table is as large as the largest index in the pickle: a few
    bytes could make it take 32 GiB.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise BapipeError(f"its index names '{module}.{name}', which is not needed to say where tensors are")
        return _NAMES[module, name]
