"""The checkpoint/2 manifest: what a checkpoint holds besides its tensors, and digests of itself and of its files."""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bapipe.errors import BapipeError, InvalidFile, UnreadableFile
from bapipe.formats.files import read_limited
from bapipe.formats.strict_json import decode_fields
from bapipe.runtime.grad_scaler import GradScalerState
from bapipe.runtime.plan_digest import NUM_DIGITS
from bapipe.training.checkpoint.tensor_files import FileDigest, TensorSpec, file_digest, stored_specs
from bapipe.units import NonNegative, Positive

MANIFEST = "bapipe.json"

MAX_MANIFEST_BYTES = 2**27
"""Enough for 300,000 parameter tensors with the state of Adam: each tensor takes about 100 bytes."""

_FILE = re.compile(r"rank-\d{1,9}\.safetensors")

_OLD_HEADER = b'{"bapipe":"checkpoint/1"'

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

ShortDigest = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{NUM_DIGITS}}}$")]


class DamagedCheckpoint(BapipeError):
    """Something in a checkpoint is missing, or differs from what was written."""


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far training is: steps done, the epoch, and how many samples of that epoch are done."""

    step: NonNegative = 0
    epoch: NonNegative = 0
    offset: NonNegative = 0


class MinibatchSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number of samples of a mini-batch from a step on."""

    from_step: NonNegative
    num_samples: Positive


class KeptOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `TrainConfig` that determine the losses of a run, and what is kept of it, but not how long it is.

    Those of the machine that it runs on are not among them. Values that JSON cannot hold are left out.
    """

    data: str | msgspec.UnsetType = msgspec.UNSET
    buckets: int | msgspec.UnsetType = msgspec.UNSET
    augment: bool | msgspec.UnsetType = msgspec.UNSET
    skip_unreadable: bool | msgspec.UnsetType = msgspec.UNSET
    learning_rate: float | msgspec.UnsetType | None = msgspec.UNSET
    learning_rate_schedule: str | msgspec.UnsetType = msgspec.UNSET
    warmup_steps: int | msgspec.UnsetType = msgspec.UNSET
    optimizer: str | msgspec.UnsetType | None = msgspec.UNSET
    optimizer_arguments: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    clip_norm: float | msgspec.UnsetType | None = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    evaluate_every: int | msgspec.UnsetType | None = msgspec.UNSET
    evaluate_samples: int | msgspec.UnsetType | None = msgspec.UNSET
    checkpoint_every: int | msgspec.UnsetType | None = msgspec.UNSET
    keep: int | msgspec.UnsetType | None = msgspec.UNSET


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a checkpoint; only `plan` depends on the plan, as tensors have the names of the original module.

    Attributes:
        digest: SHA-256 of the manifest's own text with an empty digest.
        optimizer: class of `torch.optim`, in lower case.
        num_samples: number of samples of the training data.
        minibatch_sizes: the mini-batch sizes so far, which determine the position; several if the run continued under
            plans with other sizes.
        plan: SHA-256 of the run's plan; for human readers only. None in a converted checkpoint.
        versions: versions of the software that wrote it; for human readers only.
        tensors: parameters and buffers of the model.
        non_persistent: buffers that the model's state dict leaves out and that training changes; left out if there are
            none, and in checkpoints of earlier versions.
        optimizer_tensors, optimizer_numbers: the optimizer's state, by `name of the parameter:key`.
        files: the files with the tensors, by name.
        grad_scaler: loss scaling of the next step, if losses are scaled; stored as `scaling`.
        options: options of the run, which are the defaults when it resumes; left out in checkpoints of earlier
            versions.
        samples: the `samples_digest` of the training data; left out if it has none, and in checkpoints of earlier
            versions.
    """

    bapipe: Literal["checkpoint/2"] = "checkpoint/2"
    digest: Sha256 | Literal[""] = ""
    model: str
    optimizer: str
    seed: int
    num_samples: Positive
    minibatch_sizes: tuple[MinibatchSize, ...]
    position: Position
    plan: Sha256 | None
    versions: dict[str, str]
    tensors: dict[str, TensorSpec]
    optimizer_tensors: dict[str, TensorSpec]
    optimizer_numbers: dict[str, bool | int | float]
    files: dict[str, FileDigest]
    grad_scaler: GradScalerState | None = msgspec.field(default=None, name="scaling")
    options: KeptOptions | msgspec.UnsetType = msgspec.UNSET
    non_persistent: dict[str, TensorSpec] | msgspec.UnsetType = msgspec.UNSET
    samples: ShortDigest | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE.fullmatch(name):
                raise ValueError(f"'{name}' is not the name of a rank's file")
        expected = position_after(self.position.step, self.minibatch_sizes, self.num_samples)
        if self.position != expected:
            raise ValueError(
                f"after {expected.step} steps training is at sample {expected.offset} of epoch {expected.epoch}, not "
                f"at {self.position.offset} of epoch {self.position.epoch}"
            )


def position_after(steps: int, sizes: Sequence[MinibatchSize], num_samples: int) -> Position:
    """Returns where training is after some steps; incomplete mini-batches at the end of an epoch are left out.

    Raises:
        ValueError: the mini-batch sizes do not begin at step 0, are not in order, or are larger than the data.
    """
    begins = [size.from_step for size in sizes]
    if begins[:1] != [0] or begins != sorted(set(begins)) or begins[-1] > max(steps - 1, 0):
        raise ValueError(f"mini-batch sizes from steps {begins} on, for {steps} steps")
    epoch = offset = 0
    for size, end in zip(sizes, (*begins[1:], steps), strict=True):
        if size.num_samples > num_samples:
            raise ValueError(f"a mini-batch of {size.num_samples} of {num_samples} samples")
        left, per_epoch = end - size.from_step, num_samples // size.num_samples
        in_epoch = min(left, (num_samples - offset) // size.num_samples)
        offset, left = offset + in_epoch * size.num_samples, left - in_epoch
        if left:
            epochs, rest = divmod(left - 1, per_epoch)
            epoch, offset = epoch + 1 + epochs, (rest + 1) * size.num_samples
    return Position(step=steps, epoch=epoch, offset=offset)


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the text of a manifest, with its digest."""
    return msgspec.json.encode(msgspec.structs.replace(manifest, digest=_digest(manifest)))


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, digest=""))).hexdigest()


def file_name(rank: int) -> str:
    """Returns the name of the file with the tensors that a rank writes."""
    return f"rank-{rank}.safetensors"


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint, after verifying that it and every file are what was written.

    Raises:
        DamagedCheckpoint: something is missing or damaged.
        UnreadableFile: a file cannot be read, now or by this user; it may be whole.
        BapipeError: the checkpoint is of an older version of bapipe.
    """
    manifest = read_unhashed(path)
    check_digests(path, manifest, manifest.files)
    return manifest


def read_unhashed(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint as `read_manifest` does, without reading what the files hold.

    Verified are the manifest, and names, sizes, shapes and types in the other files.
    """
    manifest = decode_manifest(path)
    for name, expected in manifest.files.items():
        _check_size(path, name, expected)
    _check_tensors(path, manifest)
    return manifest


def check_digests(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises DamagedCheckpoint or UnreadableFile unless some files of a checkpoint hold what was written."""
    for name in names:
        with _reading(path / name):
            found = file_digest(path / name)
        if found != manifest.files[name]:
            raise DamagedCheckpoint(f"{path} is damaged: '{name}' does not hold what was written")


def decode_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint, after verifying the manifest itself, but not the other files.

    Raises:
        DamagedCheckpoint, UnreadableFile, BapipeError: as `read_manifest`.
    """
    with _reading(path / MANIFEST):
        is_pipe = (path / MANIFEST).is_fifo()
    if is_pipe:
        raise DamagedCheckpoint(f"{path} is no whole checkpoint: {MANIFEST} is a pipe")  # whose reader may wait forever
    try:
        text = read_limited(path / MANIFEST, MAX_MANIFEST_BYTES)
    except UnreadableFile:
        raise
    except BapipeError as error:
        raise DamagedCheckpoint(f"{path} is no whole checkpoint: {error}") from None
    if text.startswith(_OLD_HEADER):
        raise BapipeError(
            f"{path} is of an older version, whose checkpoints can run code when they are read: "
            f"`bapipe convert-checkpoint {path}` converts it without running any"
        )
    try:
        manifest: Manifest = decode_fields(text, Manifest)
    except InvalidFile as error:
        raise DamagedCheckpoint(f"{path / MANIFEST} is damaged: {error}") from None
    # The text must be what this version writes, byte for byte: neither a key twice nor a space more.
    if manifest.digest != _digest(manifest) or text != msgspec.json.encode(manifest):
        raise DamagedCheckpoint(f"{path / MANIFEST} is damaged: its digest is of another text")
    if path.name != checkpoint_name(manifest.position.step):
        raise DamagedCheckpoint(f"{path} is damaged: it holds the checkpoint of {manifest.position.step} steps")
    return manifest


def is_old(path: Path) -> bool:
    """Returns whether a checkpoint is of an older version of bapipe."""
    try:
        if not (path / MANIFEST).is_file():
            return False
        with (path / MANIFEST).open("rb") as file:
            return file.read(len(_OLD_HEADER)) == _OLD_HEADER
    except OSError:
        return False


def checkpoint_name(step: int) -> str:
    """Returns the name of the folder of the checkpoint after some steps."""
    return f"step-{step:09d}"


def _check_size(path: Path, name: str, expected: FileDigest) -> None:
    file = path / name
    with _reading(file):
        if not file.is_file():
            raise DamagedCheckpoint(f"{path} is no whole checkpoint: '{name}' is missing")
        num_bytes = file.stat().st_size
    if num_bytes != expected.num_bytes:
        raise DamagedCheckpoint(f"{path} is damaged: '{name}' has {num_bytes} bytes, not {expected.num_bytes}")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raises UnreadableFile for an error of the operating system, such as a network disk that cannot be reached."""
    try:
        yield
    except OSError as error:
        raise UnreadableFile(f"{file}: cannot be read: {error.strerror}") from None


def _check_tensors(path: Path, manifest: Manifest) -> None:
    """Raises DamagedCheckpoint unless the files hold the tensors of the manifest, each once, and no others."""
    found: dict[str, TensorSpec] = {}
    for name in manifest.files:
        try:
            specs = stored_specs(path / name)
        except InvalidFile as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error.message}") from None
        twice = sorted(found.keys() & specs.keys())
        if twice:
            raise DamagedCheckpoint(f"{path} is damaged: '{twice[0]}' is in two files")
        found |= specs
    expected = stored_tensors(manifest)
    for name in (*expected, *found):
        if name not in found or name not in expected or found[name] != expected[name].stored:
            raise DamagedCheckpoint(f"{path} is damaged: '{name}' differs between {MANIFEST} and the files")


MODEL, NON_PERSISTENT, OPTIMIZER = "model/", "non-persistent/", "optimizer/"
"""Prefixes, in the files, of the names of the model's and the optimizer's tensors."""


def stored_tensors(manifest: Manifest) -> dict[str, TensorSpec]:
    """Returns shape and dtype of all tensors of a checkpoint, by their names in its files."""
    model = {MODEL + name: spec for name, spec in manifest.tensors.items()}
    if manifest.non_persistent is not msgspec.UNSET:
        model |= {NON_PERSISTENT + name: spec for name, spec in manifest.non_persistent.items()}
    return model | {OPTIMIZER + name: spec for name, spec in manifest.optimizer_tensors.items()}


def check_model(
    manifest: Manifest, path: Path, model: Mapping[str, TensorSpec], non_persistent: Collection[str]
) -> None:
    """Raises BapipeError with the first difference, unless a checkpoint has the tensors of a model.

    `non_persistent` are the names of the buffers that its state dict leaves out: a checkpoint may have some of them, in
    other shapes.
    """
    for name in (*model, *manifest.tensors):
        there, here = manifest.tensors.get(name), model.get(name)
        if there != here:
            raise BapipeError(
                f"{path} is of another model: '{name}' is {_describe(there)} there and {_describe(here)} here"
            )
    for name in manifest.non_persistent or ():
        if name not in non_persistent:
            raise BapipeError(f"{path} is of another model: it has a buffer '{name}', which is not persistent")
    for key in (*manifest.optimizer_tensors, *manifest.optimizer_numbers):
        name, spec = key.rpartition(":")[0], manifest.optimizer_tensors.get(key)
        # No optimizer of torch keeps a tensor for a parameter that is larger than the parameter.
        if name not in model or (spec is not None and spec.num_elements > max(model[name].num_elements, 1)):
            raise BapipeError(f"{path} is of another model: it has optimizer state '{key}'")


def _describe(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}" if tensor else "missing"
