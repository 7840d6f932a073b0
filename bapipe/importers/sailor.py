"""Profiles of groups that share each layer by tensor parallelism, as github.com/eth-easl/sailor publishes them.

`llm_info.json` has the bytes: model -> members -> layer -> bytes of one sample on one member. The times are in

    profile.json       samples -> members -> layer -> [forward, backward, update] in seconds
    mbs8_tmp4.json     a folder of tables for Metis, each for one number of samples and of members: milliseconds of
                       forward and backward together

What the figures mean, and which of them are corrected here, is written in docs/clusters.md.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Annotated, TypeVar

import msgspec

from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats.codec import decode_as, encode
from bapipe.formats.files import naming_file, read_limited
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import HALVED, DeviceKind, ModelProfile
from bapipe.formats.strict_json import decode_json
from bapipe.importers.metadata import NUM_OPTIMIZER_STATES, ImportMetadata
from bapipe.importers.to_profile import forward_of
from bapipe.optimizers import unknown_optimizer

MAX_SECONDS = 10**6
"""Longest time of a layer that is read."""

MAX_BYTES = 2**40
"""Most bytes of one sample in a layer, or of its parameters, that are read."""

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1000 * MAX_SECONDS)]
_Rows = dict[str, tuple[_Seconds, _Seconds, _Seconds]]
T = TypeVar("T")
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")
_TABLE = re.compile(rf"mbs({_NUMBER.pattern})_tmp({_NUMBER.pattern})\.json")


class LayerBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A layer in `llm_info.json`: its parameters, and what one sample takes; of one member, outputs whole."""

    params_bytes: _Bytes
    act_output_bytes: _Bytes
    act_mem_bytes: _Bytes


class _MetisTimes(msgspec.Struct, frozen=True, kw_only=True):
    optimizer_time_ms: _Milliseconds
    layer_compute_total_ms: tuple[_Milliseconds, ...]


class _MetisTable(msgspec.Struct, frozen=True, kw_only=True):
    execution_time: _MetisTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """The times of all layers for one number of samples.

    Attributes:
        update_ns: the update of the network that was profiled: an embedding, two blocks and a last layer.
    """

    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    update_ns: int


Models = Mapping[str, Mapping[int, tuple[LayerBytes, ...]]]
"""For each model and number of members the layers."""

Times = Mapping[tuple[int, int], LayerTimes]
"""For each number of samples and of members the times."""


def parse_models(text: bytes) -> Models:
    """Returns the models in an `llm_info.json`; raises InvalidFile if it is none."""
    found: dict[str, dict[str, dict[str, LayerBytes]]] = decode_json(text, dict[str, dict[str, dict[str, LayerBytes]]])
    return {
        model: {_number(members, "members"): _in_order(layers) for members, layers in by_members.items()}
        for model, by_members in found.items()
    }


def parse_times(text: bytes) -> Times:
    """Returns the times in a `profile.json`; raises InvalidFile if it is none."""
    found: dict[str, dict[str, _Rows]] = decode_json(text, dict[str, dict[str, _Rows]])
    return {
        (_number(samples, "samples"), _number(members, "members")): _times(_in_order(rows))
        for samples, by_members in found.items()
        for members, rows in by_members.items()
        if rows
    }


def parse_metis_table(text: bytes) -> LayerTimes:
    """Returns the times in a table for Metis; raises InvalidFile if it is none."""
    table: _MetisTable = decode_json(text, _MetisTable)
    found = table.execution_time
    total_ns = [round(ms * 10**6) for ms in found.layer_compute_total_ms]
    forward_ns = _first_block_as_second([forward_of(ns) for ns in total_ns])
    backward_ns = _first_block_as_second([ns - forward_of(ns) for ns in total_ns])
    # The table has the same update in the row of every layer, and their sum.
    update_ns = round(found.optimizer_time_ms * 10**6 / max(len(total_ns), 1))
    return LayerTimes(forward_ns=forward_ns, backward_ns=backward_ns, update_ns=update_ns)


def read_times(path: Path) -> Times:
    """Returns the times in a `profile.json`, or in a folder of tables for Metis; errors begin with the path."""
    if not path.is_dir():
        with naming_file(path):
            return parse_times(read_limited(path))
    tables: dict[tuple[int, int], LayerTimes] = {}
    for table in sorted(path.iterdir()):
        if name := _TABLE.fullmatch(table.name):
            with naming_file(table):
                tables[int(name[1]), int(name[2])] = parse_metis_table(read_limited(table))
    if not tables:
        raise BapipeError(f"{path}: no tables for Metis in this folder; want files such as mbs8_tmp4.json")
    return tables


def read_models(path: Path) -> Models:
    """Returns the models in an `llm_info.json`; errors begin with the path."""
    with naming_file(path):
        return parse_models(read_limited(path))


def import_group(path: Path, layers: Path, metadata: ImportMetadata, members: int) -> ModelProfile:
    """Returns the profile in Sailor's files: `path` has the times, `layers` the bytes; errors begin with `path`."""
    times, models = read_times(path), read_models(layers)
    try:
        return group_profile(times, models, metadata, members)
    except BapipeError as error:
        raise BapipeError(f"{path}: {error}") from None


def layers_of(models: Models, model: str, members: int) -> tuple[LayerBytes, ...]:
    """Returns a model's layers on one of some members.

    Raises:
        BapipeError: no such model, or not for this number of members.
    """
    if model not in models:
        raise BapipeError(f"the layers hold no model '{model}'; want one of {', '.join(sorted(models)) or 'none'}")
    if members not in models[model]:
        raise BapipeError(f"the layers of {model} are not those of {members} members; want {_listed(models[model])}")
    return models[model][members]


def group_profile(times: Times, models: Models, metadata: ImportMetadata, members: int) -> ModelProfile:
    """Returns the profile of a group of some members; of a single device if it is one.

    `metadata.sizes` selects micro-batch sizes, all if it is empty; `metadata.batch_size` is not used.

    Raises:
        BapipeError: an unknown model or optimizer, no times for the members or sizes, or times of another model.
    """
    layers = layers_of(models, metadata.model, members)
    if metadata.optimizer not in NUM_OPTIMIZER_STATES:
        raise unknown_optimizer(metadata.optimizer, NUM_OPTIMIZER_STATES)
    by_size = _selected(times, metadata, members)
    for size, found in by_size.items():
        _check_model(len(found.forward_ns), len(layers), models, metadata.model, size)
    shares = _update_shares(layers, median_low(found.update_ns for found in by_size.values()))
    states = NUM_OPTIMIZER_STATES[metadata.optimizer]
    profile = ModelProfile(
        model=metadata.model,
        device=_device(metadata, members),
        dtype="float32",
        optimizer=metadata.optimizer,
        environment={"source": metadata.source, HALVED: "halves of the measured backward"},
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                kind=_kind(index, len(layers)),
                inputs=(f"layer{index - 1}" if index else "tokens",),
                outputs=(f"layer{index}",),
                param_bytes=layer.params_bytes,
                optimizer_state_bytes=layer.params_bytes * states,
                update_ns=update_ns,
            )
            for index, (layer, update_ns) in enumerate(zip(layers, shares, strict=True))
        ),
        measurements=tuple(
            Measurement(microbatch_size=size, layers=_measured(by_size[size], layers, size, members))
            for size in sorted(by_size)
        ),
    )
    return decode_as(encode(profile), ModelProfile)  # refuses what a profile cannot hold, before it is written


def kind_of(gpu: str, members: int) -> str:
    """Returns the kind of a group in profiles and clusters."""
    return gpu if members == 1 else f"{gpu}x{members}"


def _device(metadata: ImportMetadata, members: int) -> DeviceKind:
    kind = kind_of(metadata.kind, members)
    device = DeviceKind(kind=kind, name=metadata.device_name, memory_bytes=metadata.memory_bytes)
    return device if members == 1 else msgspec.structs.replace(device, members=members, split="tensor")


def _kind(index: int, num_layers: int) -> str:
    return "embedding" if index == 0 else "head" if index == num_layers - 1 else "block"


def _number(text: str, what: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise InvalidFile(f"'{text[:40]}' is not a number of {what}; want an integer from 1 to 999,999", "$")
    return int(text)


def _in_order(rows: Mapping[str, T]) -> tuple[T, ...]:
    """Returns the rows of layers by their numbers, from 0."""
    missing = [index for index in range(len(rows)) if str(index) not in rows]
    if missing:
        raise InvalidFile(f"{len(rows)} layers without layer {missing[0]}; want them numbered from 0", "$")
    return tuple(rows[str(index)] for index in range(len(rows)))


def _times(rows: Sequence[tuple[float, float, float]]) -> LayerTimes:
    columns = zip(*rows, strict=True)
    forward_ns, backward_ns, update_ns = ([round(seconds * 10**9) for seconds in column] for column in columns)
    return LayerTimes(
        forward_ns=_first_block_as_second(forward_ns),
        backward_ns=_first_block_as_second(backward_ns),
        update_ns=median_low(update_ns),
    )


def _first_block_as_second(times_ns: Sequence[int]) -> tuple[int, ...]:
    """Returns times in which the first block takes as long as the second, without what runs once in a network."""
    return (times_ns[0], times_ns[2], *times_ns[2:]) if len(times_ns) > 3 else tuple(times_ns)


def _selected(times: Times, metadata: ImportMetadata, members: int) -> dict[int, LayerTimes]:
    found = {samples: at for (samples, of), at in times.items() if of == members}
    if not found:
        raise BapipeError(f"no times for {members} members; the file has those for {_listed({m for _, m in times})}")
    for size in metadata.sizes:
        if size not in found:
            raise BapipeError(f"no times for micro-batches of {size} and {members} members; want {_listed(found)}")
    return {size: found[size] for size in metadata.sizes or found}


def _check_model(num_timed: int, num_layers: int, models: Models, model: str, size: int) -> None:
    """Raises BapipeError if times are of another number of layers than the model has, and names models that have it."""
    if num_timed == num_layers:
        return
    others = sorted(name for name, by_members in models.items() if num_timed in map(len, by_members.values()))
    whose = f", as {' and '.join(others)} {'has' if len(others) == 1 else 'have'}" if others else ""
    raise BapipeError(
        f"the times at micro-batches of {size} are those of {num_timed} layers{whose}; {model} has {num_layers}: "
        "the file is not of this model"
    )


def _update_shares(layers: Sequence[LayerBytes], update_ns: int) -> list[int]:
    """Returns the update of each layer: its share, by parameters, of that of the network that was profiled."""
    profiled = [*layers[:3], *layers[3:][-1:]]
    total = sum(layer.params_bytes for layer in profiled)
    return [update_ns * layer.params_bytes // total if total else 0 for layer in layers]


def _measured(times: LayerTimes, layers: Sequence[LayerBytes], size: int, members: int) -> tuple[LayerMeasurement, ...]:
    measured = []
    for index, (layer, forward_ns, backward_ns) in enumerate(
        zip(layers, times.forward_ns, times.backward_ns, strict=True)
    ):
        weight_ns = backward_ns // 2 if index else backward_ns
        measured.append(
            LayerMeasurement(
                forward_ns=forward_ns,
                input_grad_ns=backward_ns - weight_ns,
                weight_grad_ns=weight_ns,
                stash_bytes=layer.act_mem_bytes * size,
                output_bytes=(-(-layer.act_output_bytes * size // members),),  # a member sends its share
            )
        )
    return tuple(measured)


def _listed(numbers: Mapping[int, object] | set[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
