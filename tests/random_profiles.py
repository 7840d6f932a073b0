"""Random small profiles and clusters, the same for the same seed."""

from collections.abc import Sequence
from random import Random

from msgspec import UNSET
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.formats.host_times import HostTimes
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import DeviceKind, ModelProfile


def random_profile(
    random: Random,
    num_layers: int,
    sizes: tuple[int, ...] = (1, 2, 4),
    kind: str = "a",
    splits_badly: bool = False,
    shares: bool = False,
    frozen: bool = False,
) -> ModelProfile:
    """A chain with some skip connections; figures small enough that ties are common.

    If `splits_badly`, some layers have a separate time of B, and I leaves gradients for W. If `shares`, two layers use
    the same parameters. If `frozen`, layers train all, some or none of their parameters.
    """
    layers = []
    for i in range(num_layers):
        inputs = ["x"] if i == 0 else [f"t{i - 1}"]
        if i > 1 and random.random() < 0.3:
            inputs.append(f"t{random.randrange(i - 1)}")
        layers.append(
            LayerProfile(
                name=f"l{i}",
                kind="Layer",
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=(f"t{i}",),
                param_bytes=random.randrange(20),
                optimizer_state_bytes=random.randrange(20),
                update_ns=random.choice([0, random.randrange(60)]),
                no_gradient=(f"t{i}",) if random.random() < 0.1 else (),
            )
        )
    layers = _sharing(random, layers) if shares else layers
    return ModelProfile(
        model="random",
        device=DeviceKind(kind=kind, name="none", memory_bytes=10**6),
        dtype="float32",
        optimizer="sgd-momentum",
        layers=tuple(_freezing(random, layers) if frozen else layers),
        measurements=tuple(
            _split_badly(random, measured) if splits_badly else measured
            for measured in (_measurement(random, size, num_layers) for size in sizes)
        ),
    )


def with_host_times(random: Random, profile: ModelProfile, most_ns: int = 150) -> ModelProfile:
    """The profile of a device with a host, which is the slower of the two for some of the layers."""

    def changed(layer: LayerMeasurement) -> LayerMeasurement:
        f, i, w, b = (random.choice([0, random.randrange(most_ns)]) for _ in range(4))
        host = HostTimes(forward_ns=f, input_grad_ns=i, weight_grad_ns=w, backward_ns=b)
        return replace(layer, host=UNSET if random.random() < 0.2 else host)

    measurements = tuple(replace(m, layers=tuple(map(changed, m.layers))) for m in profile.measurements)
    return replace(profile, measurements=measurements)


def with_exchanges(random: Random, profile: ModelProfile) -> ModelProfile:
    """The profile of groups of two, whose members exchange data for some, or all, of the time of some layers."""

    def changed(layer: LayerMeasurement) -> LayerMeasurement:
        forward, backward = (
            random.choice([0, ns, random.randint(0, ns)]) for ns in (layer.forward_ns, layer.whole_backward_ns)
        )
        return replace(layer, forward_exchange_ns=forward, backward_exchange_ns=backward)

    measurements = tuple(replace(m, layers=tuple(map(changed, m.layers))) for m in profile.measurements)
    return replace(profile, device=replace(profile.device, members=2, split="filter"), measurements=measurements)


def of_groups(cluster: Cluster) -> Cluster:
    """The cluster with a group of two for each of its devices."""
    devices = tuple(replace(d, members=(f"{d.name}.0", f"{d.name}.1")) for d in cluster.devices)
    return replace(cluster, devices=devices)


def _sharing(random: Random, layers: list[LayerProfile]) -> list[LayerProfile]:
    counting = [i for i, layer in enumerate(layers[:-1]) if layer.param_bytes]
    if not counting:
        return layers
    owner = random.choice(counting)
    user = random.randrange(owner + 1, len(layers))
    changed = list(layers)
    changed[owner] = replace(layers[owner], shares=(layers[user].name,))
    num_bytes = random.randrange(1, layers[owner].param_bytes + 1)
    changed[user] = replace(layers[user], shares=(layers[owner].name,), shared_bytes=num_bytes)
    return changed


def _freezing(random: Random, layers: list[LayerProfile]) -> list[LayerProfile]:
    """Layers with some of their parameters not trained; shared ones are trained as far as in their owner."""
    frozen = {}
    for layer in layers:
        trained = random.choice([UNSET, UNSET, 0, random.randint(0, layer.param_bytes)])
        frozen[layer.name] = replace(layer, trained_bytes=trained)
    for layer in layers:
        if layer.shared_bytes:
            shared_trained = min(layer.shared_bytes, frozen[layer.shares[0]].gradient_bytes)
            frozen[layer.name] = replace(frozen[layer.name], shared_trained_bytes=shared_trained)
    return list(frozen.values())


def _split_badly(random: Random, measured: Measurement) -> Measurement:
    def changed(layer: LayerMeasurement) -> LayerMeasurement:
        backward_ns = random.choice([UNSET, random.randrange(120) * measured.microbatch_size])
        return replace(
            layer, backward_ns=backward_ns, gradient_stash_bytes=random.choice([UNSET, random.randrange(30)])
        )

    return replace(measured, layers=tuple(map(changed, measured.layers)))


def _measurement(random: Random, size: int, num_layers: int) -> Measurement:
    return Measurement(
        microbatch_size=size,
        layers=tuple(
            LayerMeasurement(
                forward_ns=random.randrange(60) * size,
                input_grad_ns=random.randrange(60) * size,
                weight_grad_ns=random.randrange(60) * size,
                stash_bytes=random.randrange(30) * size,
                workspace_bytes=random.randrange(20),
                output_bytes=(random.choice([0, random.randrange(40) * size]),),
            )
            for _ in range(num_layers)
        ),
    )


def random_cluster(random: Random, num_devices: int, kinds: tuple[str, ...] = ("a",)) -> Cluster:
    """Devices of several speeds on one to three hosts, some of which cannot compute while they transfer."""
    names = [f"d{i}" for i in range(num_devices)]
    num_hosts = random.randint(1, 3)
    overlaps = random.random() < 0.7
    pairs = [(a, b) for a in names for b in names if a != b]
    return Cluster(
        devices=tuple(
            Device(
                name=name,
                host=f"h{random.randrange(num_hosts)}",
                kind=random.choice(kinds),
                memory_bytes=random.choice([10**6, random.randrange(50, 900)]),
                speed=random.choice([1.0, 1.0, 2.0, 0.5, 1.5, 0.3]),
                overlaps_transfers=overlaps or random.random() < 0.5,
            )
            for name in names
        ),
        intra_host=_bandwidth(random),
        inter_host=_bandwidth(random),
        links=tuple(
            Link(source=a, target=b, bytes_per_s=random.randrange(10**8, 10**10), latency_ns=random.randrange(50))
            for a, b in random.sample(pairs, min(len(pairs), random.randrange(3)))
        ),
    )


def _bandwidth(random: Random) -> Bandwidth:
    return Bandwidth(bytes_per_s=random.randrange(10**8, 10**10), latency_ns=random.randrange(50))


def same_devices(random: Random, num_devices: int) -> Cluster:
    link = Bandwidth(bytes_per_s=random.randrange(10**8, 10**10), latency_ns=random.randrange(50))
    speed, memory_bytes = random.choice([1.0, 1.0, 1.5, 0.3]), random.choice([10**6, random.randrange(50, 900)])
    overlaps = random.random() < 0.6
    return Cluster(
        devices=tuple(
            Device(
                name=f"d{i}", host="h", kind="a", memory_bytes=memory_bytes, speed=speed, overlaps_transfers=overlaps
            )
            for i in range(num_devices)
        ),
        intra_host=link,
        inter_host=link,
    )


def with_tensors_of(others: Sequence[Measurement], own: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Other measurements of the same layers, with tensors as large as those of one's own."""
    return tuple(
        replace(
            other,
            layers=tuple(
                replace(times, output_bytes=layer.output_bytes)
                for times, layer in zip(other.layers, of_size.layers, strict=True)
            ),
        )
        for other, of_size in zip(others, own, strict=True)
    )
