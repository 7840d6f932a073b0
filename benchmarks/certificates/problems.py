"""Random problems: chains of hundreds of layers on up to 128 devices, and small ones with every feature."""

from dataclasses import dataclass
from itertools import accumulate
from random import Random

from msgspec import UNSET
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import DeviceKind, ModelProfile, ProfilesByKind
from bapipe.planner.inputs.options import PlanOptions
from bapipe.schedules import LOOPED, SCHEDULES
from tests.random_profiles import random_cluster, random_profile, with_host_times

MB = 10**6

LARGE_SCHEDULES = (
    *[("1f1b", "gpipe")] * 4,
    ("1f1b",),
    ("gpipe",),
    ("zb-h1",),
    ("1f1b", "zb-h1", "gpipe"),
    ("eager-1f1b",),
    ("interleaved-1f1b",),
    ("zb-v",),
)


@dataclass(frozen=True, kw_only=True)
class RandomProblem:
    """What is planned. `in_words` is short, for a line of output."""

    profiles: ProfilesByKind
    cluster: Cluster
    options: PlanOptions
    in_words: str


def large_problem(
    seed: int, layers: tuple[int, int], devices: tuple[int, int], time_limit_s: float | None = None
) -> RandomProblem:
    """Layers that differ by a factor of ten, tensors of 1 KB to 32 MB, links of 1 to 100 GB/s, and so on."""
    random = Random(f"large {seed}")
    num_layers, num_devices = random.randint(*layers), _skewed(random, *devices)
    sizes = random.choice([(1,), (1,), (1, 2), (1, 4)])
    num_microbatches = random.choice([4, 8, 16, 32, 64] if num_devices <= 32 else [32, 64, 128])
    kinds = random.choice([("gpu",), ("gpu",), ("gpu",), ("gpu", "other")])
    base = _chain(random, num_layers, sizes)
    profiles = {kind: base if kind == "gpu" else _on_another_kind(random, base, kind) for kind in kinds}
    profiles = _with_host_times(seed, profiles, 1_000_000)
    schedules = random.choice(LARGE_SCHEDULES)
    if schedules[0] in LOOPED:
        num_devices = min(num_devices, 16)
    cluster = _large_cluster(random, num_devices, kinds, _needed_bytes(base, num_devices))
    options = PlanOptions(
        minibatch_size=sizes[-1] * num_microbatches,
        schedules=schedules,
        replicas=random.random() < 0.6,
        recompute=random.random() < 0.7,
        time_limit_s=time_limit_s,
    )
    speeds = {device.speed for device in cluster.devices}
    words = (
        f"{num_layers} layers, {num_devices} {'unlike ' if len(speeds) > 1 or len(kinds) > 1 else ''}devices on "
        f"{len({device.host for device in cluster.devices})} hosts, mini-batch {options.minibatch_size}, "
        f"{'+'.join(schedules)}{'' if options.replicas else ', no replicas'}"
    )
    return RandomProblem(profiles=profiles, cluster=cluster, options=options, in_words=words)


def _with_host_times(seed: int, profiles: dict[str, ModelProfile], most_ns: int = 150) -> dict[str, ModelProfile]:
    """The profiles; a quarter of the problems have hosts that are slower than their devices in some layers."""
    if seed % 4 != 1:
        return profiles
    random = Random(f"host {seed}")
    return {kind: with_host_times(random, profile, most_ns) for kind, profile in profiles.items()}


def _skewed(random: Random, low: int, high: int) -> int:
    """A number between two, small ones more often."""
    return min(high, round(low * (high / low) ** random.random()))


def _chain(random: Random, num_layers: int, sizes: tuple[int, ...]) -> ModelProfile:
    largest = 10 ** random.uniform(3, 7.5)
    period = random.choice([1, 4, 12, num_layers])
    parameters = random.randrange(MB // 4, random.choice([1, 40]) * MB)
    stash_factor, splits = random.choice([1, 1, 4, 20]), random.random() < 0.3
    pattern = [
        (random.randrange(100_000, 1_000_000), round(largest * random.random()), random.uniform(0.5, 1.5))
        for _ in range(period)
    ]
    has_skips, some_updates = random.random() < 0.2, random.random() < 0.3
    layers, measured = [], []
    for i in range(num_layers):
        skip = (f"t{i - random.randint(2, 9)}",) if has_skips and i > 10 and random.random() < 0.1 else ()
        layers.append(
            LayerProfile(
                name=f"l{i}",
                kind="Layer",
                inputs=(f"t{i}", *skip),
                outputs=(f"t{i + 1}",),
                param_bytes=parameters,
                optimizer_state_bytes=2 * parameters if some_updates else 0,
                update_ns=random.randrange(100_000) if some_updates else 0,
            )
        )
        forward_ns, num_bytes, ratio = pattern[i % period]
        measured.append((forward_ns, num_bytes, round(forward_ns * ratio)))
    if random.random() < 0.1:
        layers[0] = replace(layers[0], shares=(layers[-1].name,))
        layers[-1] = replace(layers[-1], shares=(layers[0].name,), shared_bytes=parameters // 2)
    return ModelProfile(
        model="chain",
        device=DeviceKind(kind="gpu", name="none", memory_bytes=2**40),
        dtype="float32",
        optimizer="sgd",
        layers=tuple(layers),
        measurements=tuple(
            Measurement(
                microbatch_size=size,
                layers=tuple(
                    LayerMeasurement(
                        forward_ns=round(forward_ns * size**0.9),
                        input_grad_ns=round(backward_ns * size**0.9),
                        weight_grad_ns=round(forward_ns * size**0.9),
                        backward_ns=round((forward_ns + 0.8 * backward_ns) * size**0.9) if splits else UNSET,
                        stash_bytes=stash_factor * num_bytes * size,
                        workspace_bytes=num_bytes,
                        output_bytes=(num_bytes * size,),
                    )
                    for forward_ns, num_bytes, backward_ns in measured
                ),
            )
            for size in sizes
        ),
    )


def _on_another_kind(random: Random, profile: ModelProfile, kind: str) -> ModelProfile:
    """The profile of devices that are faster in some layers and slower in others."""
    factors = [random.uniform(0.5, 2) for _ in profile.layers]
    return replace(
        profile,
        device=replace(profile.device, kind=kind),
        measurements=tuple(
            replace(
                measured,
                layers=tuple(
                    replace(
                        layer,
                        forward_ns=round(layer.forward_ns * factor),
                        input_grad_ns=round(layer.input_grad_ns * factor),
                        weight_grad_ns=round(layer.weight_grad_ns * factor),
                        backward_ns=UNSET,
                    )
                    for layer, factor in zip(measured.layers, factors, strict=True)
                ),
            )
            for measured in profile.measurements
        ),
    )


def _needed_bytes(profile: ModelProfile, num_devices: int) -> float:
    """What each device holds if parameters and one micro-batch's stash are shared equally."""
    static = sum(2 * layer.param_bytes + layer.optimizer_state_bytes for layer in profile.layers)
    return (static + sum(layer.stash_bytes for layer in profile.measurements[-1].layers)) / num_devices


def _large_cluster(random: Random, num_devices: int, kinds: tuple[str, ...], needed_bytes: float) -> Cluster:
    """Alike or unlike devices on one or several hosts, in half of the clusters of unlike ones the first is slow."""
    alike, per_host = random.random() < 0.4, random.choice([num_devices, num_devices, 4, 8])
    speeds = [1.0 if alike else round(random.uniform(0.6, 1.0), 2) for _ in range(num_devices)]
    if not alike and random.random() < 0.5:
        speeds[0] = round(random.uniform(0.2, 0.5), 2)
    tight = round(needed_bytes * random.uniform(1.05, 4))
    memory_bytes = random.choice([2**40, 2**40, tight])
    inside = Bandwidth(bytes_per_s=round(10 ** random.uniform(9, 11)), latency_ns=10_000)
    between = replace(inside, bytes_per_s=round(inside.bytes_per_s / random.choice([1, 4, 16])))
    overlaps = random.random() < 0.9 or num_devices > 8
    return Cluster(
        devices=tuple(
            Device(
                name=f"d{i}",
                host=f"h{i // per_host}",
                kind=kinds[i * len(kinds) // num_devices],
                memory_bytes=memory_bytes,
                speed=speed,
                overlaps_transfers=overlaps,
            )
            for i, speed in enumerate(speeds)
        ),
        intra_host=inside,
        inter_host=between,
    )


def small_problem(seed: int) -> RandomProblem:
    """Up to five layers and three devices, few enough to try every plan; ties are common."""
    random = Random(f"small {seed}")
    splits, shares, frozen = (random.random() < 0.3 for _ in range(3))
    num_layers, measured = random.randint(1, 5), random.choice([(1,), (2,), (1, 2)])
    kinds = random.choice([("a",), ("a",), ("a", "b")])
    layers = Random(random.random())
    profile = random_profile(layers, num_layers, measured, splits_badly=splits, shares=shares, frozen=frozen)
    if random.random() < 0.15:
        profile = _with_large_parameters(profile)
    profiles = {kind: profile if kind == "a" else _on_another_kind(random, profile, kind) for kind in kinds}
    profiles = _with_host_times(seed, profiles)
    cluster = random_cluster(random, random.randint(1, 3), kinds)
    if random.random() < 0.15:
        cluster = replace(cluster, intra_host_sum=Bandwidth(bytes_per_s=10**9, latency_ns=random.randrange(50)))
    cluster = _with_memory(random, profile, cluster)
    names = [*SCHEDULES, *LOOPED]
    schedules = ("1f1b", "gpipe") if random.random() < 0.4 else tuple(random.sample(names, random.randint(1, 2)))
    options = PlanOptions(
        minibatch_size=measured[-1] * random.randint(1, 6),
        schedules=schedules,
        replicas=random.random() < 0.8,
        recompute=random.random() < 0.7,
        num_stages=random.randint(1, 3) if random.random() < 0.1 else None,
        memory_margin=random.choice([0.0, 0.0, 0.1]),
    )
    words = f"{num_layers} layers, {len(cluster.devices)} devices, {'+'.join(schedules)}"
    return RandomProblem(profiles=profiles, cluster=cluster, options=options, in_words=words)


def _with_large_parameters(profile: ModelProfile) -> ModelProfile:
    """Parameters of many megabytes, so that all-reduces take several buckets."""
    layers = []
    for layer in profile.layers:
        trained = layer.trained_bytes if layer.trained_bytes is UNSET else layer.trained_bytes * 2**20
        shared_trained = layer.shared_trained_bytes
        layers.append(
            replace(
                layer,
                param_bytes=layer.param_bytes * 2**20,
                trained_bytes=trained,
                shared_bytes=layer.shared_bytes * 2**20,
                shared_trained_bytes=shared_trained if shared_trained is UNSET else shared_trained * 2**20,
            )
        )
    return replace(profile, layers=tuple(layers))


def _with_memory(random: Random, profile: ModelProfile, cluster: Cluster) -> Cluster:
    """Devices with plenty of memory, or a part of what all layers need."""
    static = list(accumulate(2 * layer.param_bytes + layer.optimizer_state_bytes for layer in profile.layers))[-1]
    needed = static + 3 * sum(layer.stash_bytes for layer in profile.measurements[-1].layers)
    plenty = random.random() < 0.5
    return replace(
        cluster,
        devices=tuple(
            replace(device, memory_bytes=2**40 if plenty else round(needed * random.uniform(0.3, 1.5)))
            for device in cluster.devices
        ),
    )
