"""The kinds of files about groups: Sailor's and ParaDL's tables, profiles to estimate from, clusters, plans."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec

import bapipe
from bapipe.estimates import estimate
from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.formats.codec import encode, read
from bapipe.formats.layer_shape import LayerShape
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile, Split
from bapipe.importers import import_file
from bapipe.importers.paradl import is_paradl
from bapipe.importers.sailor import group_profile, import_group, parse_models, parse_times
from bapipe.planner.inputs.link_catalogue import cluster_like
from bapipe.planner.make import make
from bapipe.report import render_cluster, render_plan, render_profile
from benchmarks.fuzz.kinds import MAX_DEVICES, ORIGIN, Kind, WrongSuccess, check_says, check_shown, shown

_MEMBERS = 2
_MINIBATCH = 8
_SPLITS: tuple[Split, ...] = get_args(Split)
_SAILOR = replace(ORIGIN, model="small", kind="GPU", sizes=())
_PARADL = """\
Dataset|Digits
Input|100x1x4x4
Model|small
# first group
CONV_1a|1x4x4|1x2x3x3|2x4x4|0.000036
RELU|2x4x4|2x2x0x0|2x4x4|0
FC2|2x4x4|2x3x4x4|3x1x1|0.000012
"""


def group_kinds() -> tuple[Kind, ...]:
    """Returns the kinds."""
    times, layers, metis = (json.dumps(value).encode() for value in (_times(), _layers(), _metis()))
    single, group = small_profile(), small_profile(_MEMBERS)
    shaped, profiles = _with_shapes(single), [single, group]
    cluster = _cluster(single, group)
    catalogued = cluster_like(_like_gpu(single), 4, 2, "nvlink3", "ndr400")
    plan = bapipe.plan(profiles, cluster, minibatch_size=_MINIBATCH, num_stages=2)
    recomputed = make(single, 2, minibatch_size=_MINIBATCH, num_stages=2, recompute_layers=[single.layers[1].name])

    def use_times(path: Path) -> None:
        _import(path, _beside(path, "llm_info.json", layers))

    def use_layers(path: Path) -> None:
        _import(_beside(path, "profile.json", times), path)

    def use_metis(path: Path) -> None:
        table = _beside(path, f"mbs4_tmp{_MEMBERS}.json", path.read_bytes())
        _import(table.parent, _beside(path, "llm_info.json", layers))

    def use_group_profile(path: Path) -> None:
        found = read(path, ModelProfile)
        check_says(path, encode(found))
        _show_profile(found)
        bapipe.plan([single, found], cluster, minibatch_size=_MINIBATCH, num_stages=2)

    def use_shaped_profile(path: Path) -> None:
        found = read(path, ModelProfile)
        check_says(path, encode(found))
        for split in _SPLITS:
            whole = [] if split == "sharded" else [found.layers[-1].name]
            _show_profile(estimate(found, split, _MEMBERS, cluster, whole=whole))

    def use_cluster(path: Path) -> None:
        found = read(path, Cluster)
        check_says(path, encode(found))
        check_shown(shown(render_cluster(found)))
        if len(found.devices) <= MAX_DEVICES:
            bapipe.plan([single, group, _like_gpu(single)], found, minibatch_size=_MINIBATCH, num_stages=1)

    def use_plan(path: Path) -> None:
        found = read(path, Plan)
        check_says(path, encode(found), () if found.is_judged else ("prediction", "certificate", "alternatives"))
        check_shown(shown(render_plan(found)))
        bapipe.simulate(found, profiles)

    return (
        Kind(name="paradl", seeds=(_PARADL.encode(),), use=_use_paradl),
        Kind(name="sailor-times", seeds=(times,), use=use_times),
        Kind(name="sailor-layers", seeds=(layers,), use=use_layers),
        Kind(name="metis", seeds=(metis,), use=use_metis),
        Kind(name="group-profile", seeds=(encode(group),), use=use_group_profile),
        Kind(name="shapes", seeds=(encode(shaped),), use=use_shaped_profile),
        Kind(name="group-cluster", seeds=(encode(cluster), encode(catalogued)), use=use_cluster),
        Kind(name="group-plan", seeds=(encode(plan), encode(recomputed)), use=use_plan),
    )


def _beside(path: Path, name: str, content: bytes) -> Path:
    """Returns a file of a name and a content, in a folder beside a path."""
    folder = path.with_name("sailor")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def _import(times: Path, layers: Path) -> None:
    found = import_group(times, layers, _SAILOR, _MEMBERS)
    said = json.loads(layers.read_bytes())[_SAILOR.model][str(_MEMBERS)]
    wanted = [said[str(index)]["params_bytes"] for index in range(len(said))]
    if [layer.param_bytes for layer in found.layers] != wanted:
        raise WrongSuccess(f"parameters of {wanted} bytes in the file")
    _show_profile(found)


def _use_paradl(path: Path) -> None:
    found = import_file(path, ORIGIN)
    lines = [line.strip() for line in path.read_text().splitlines()]
    num_rows = sum(bool(line) and not line.startswith(("#", "Dataset|", "Input|", "Model|")) for line in lines)
    if is_paradl(path.read_text()) and len(found.layers) != num_rows:
        raise WrongSuccess(f"{num_rows} rows in the file, {len(found.layers)} layers read")
    _show_profile(found)


def _show_profile(profile: ModelProfile) -> None:
    check_shown(shown(render_profile(profile)))


def small_profile(members: int = 1) -> ModelProfile:
    """Returns the profile of five layers on single devices, or on groups of two."""
    times, layers = (json.dumps(value).encode() for value in (_times(), _layers()))
    return group_profile(parse_times(times), parse_models(layers), _SAILOR, members)


def _times() -> dict[str, Any]:
    """Returns times for two numbers of samples; the last layers as fast as the first."""
    rows = {str(index): [1e-6 * (index + 1), 2e-6, 8e-6] for index in range(5)}
    return {samples: {"1": rows, str(_MEMBERS): rows} for samples in ("1", "4")}


def _layers() -> dict[str, Any]:
    layer = {"params_bytes": 80, "act_output_bytes": 6, "act_mem_bytes": 50, "act_input_bytes": 1}
    rows = {str(index): layer for index in range(5)}
    return {_SAILOR.model: {"1": rows, str(_MEMBERS): rows}, "other": {"1": {"0": layer}}}


def _metis() -> dict[str, Any]:
    times = {"optimizer_time_ms": 0.040, "layer_compute_total_ms": [0.003, 0.018, 0.009, 0.009, 0.012]}
    return {"model": {"num_layers": 5}, "execution_time": times}


def _with_shapes(profile: ModelProfile) -> ModelProfile:
    """Returns a profile in which some layers can be split by channels or planes."""
    shapes = (
        LayerShape(in_channels=4, out_channels=4, in_planes=8, out_planes=8, window=3, padding=1),
        LayerShape(in_channels=4, out_channels=4, in_planes=8, out_planes=8, mixes_channels=False, sums_samples=True),
    )
    layers = (
        msgspec.structs.replace(layer, shape=shape) for layer, shape in zip(profile.layers, shapes * 2, strict=False)
    )
    return msgspec.structs.replace(profile, layers=(*layers, *profile.layers[2 * len(shapes) :]))


def _like_gpu(profile: ModelProfile) -> ModelProfile:
    """Returns the profile as one of a GPU, for which the catalogue has links."""
    return msgspec.structs.replace(profile, device=msgspec.structs.replace(profile.device, kind="cuda", name="A100"))


def _cluster(single: ModelProfile, group: ModelProfile) -> Cluster:
    """Returns single devices and a group of some, with links of their own."""

    def device(name: str, profile: ModelProfile) -> Device:
        return Device(name=name, host="a", kind=profile.device.kind, memory_bytes=2**34)

    members = tuple(f"gpu{index}" for index in range(1, 1 + _MEMBERS))
    group_device = msgspec.structs.replace(device("pair", group), members=members)
    link = Bandwidth(bytes_per_s=10**9, latency_ns=1000)
    return Cluster(
        devices=(device("gpu0", single), group_device, device("gpu9", single)),
        intra_host=link,
        inter_host=link,
        links=(Link(source=members[0], target=members[1], bytes_per_s=10**10, latency_ns=500),),
    )
