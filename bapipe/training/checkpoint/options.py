"""The options of a run that its checkpoints keep, so that they need not be given again when the run is resumed."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.folder import list_checkpoints
from bapipe.training.checkpoint.manifest import DamagedCheckpoint, KeptOptions, decode_manifest
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.trust import why_untrusted

_log = logging.getLogger(__name__)


def kept_options(config: TrainConfig) -> KeptOptions:
    """Returns the options of a run that its checkpoints keep."""
    values = {}
    for name in KeptOptions.__struct_fields__:
        try:
            values[name] = msgspec.json.decode(msgspec.json.encode(getattr(config, name)))
        except TypeError:  # such as a tensor among the arguments of an optimizer
            continue
    return KeptOptions(**values)


def resumed_options(config: TrainConfig, given: Collection[str], *, tell: bool) -> TrainConfig:
    """Returns the options of a run that resumes: those that were given, and for the others those of the checkpoint.

    Args:
        given: names of the options that the user has set.
        tell: whether to log a line about each one that differs from the checkpoint's.

    Raises:
        BapipeError: the checkpoint's data is a function or outside the current folder, which only the user may name; or
            a value is out of range.
    """
    kept = _by_name(_kept_in(config))
    data = kept.get("data")
    if "data" not in given and isinstance(data, str) and (why := why_untrusted(data)):
        raise BapipeError(
            f"the checkpoints in {config.checkpoint} were trained on `data` {data}: name it again, because {why}"
        )
    for name, value in _by_name(kept_options(config)).items():
        if tell and name in given and name in kept and kept[name] != value:
            was = "not set" if kept[name] is None else kept[name]
            _log.warning("`%s` is now %s; it was %s in the run of the checkpoint", name, value, was)
    return replace(config, **{name: value for name, value in kept.items() if name not in given})


def _by_name(options: KeptOptions) -> Mapping[str, Any]:
    values = {name: getattr(options, name) for name in KeptOptions.__struct_fields__}
    return {name: value for name, value in values.items() if value is not msgspec.UNSET}


def _kept_in(config: TrainConfig) -> KeptOptions:
    """Returns the options in the newest checkpoint whose manifest can be read; empty ones without such a checkpoint."""
    for path in reversed(list_checkpoints(config.checkpoint) if config.checkpoint is not None else ()):
        try:
            options = decode_manifest(path).options
        except DamagedCheckpoint:  # which is reported when the checkpoint itself is read
            continue
        return KeptOptions() if options is msgspec.UNSET else options
    return KeptOptions()
