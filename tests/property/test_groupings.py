"""The best plan over groups of one, two and four is the fastest of all, on up to 4 devices and 8 layers.

Tried are all tilings of the host with groups of one size, and for each all cuts and all numbers of replicas; every plan is timed by
the second simulator.
"""

from collections.abc import Iterator
from itertools import combinations
from random import Random

import msgspec
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError
from bapipe.estimates import estimate
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.layer_shape import LayerShape
from bapipe.formats.profile import ModelProfile, Split
from bapipe.planner.inputs.options import PlanOptions
from bapipe.schedules.placement import place_schedule
from tests.oracles.reference_simulator import simulate as reference
from tests.random_profiles import random_profile

SPLITS: tuple[Split, ...] = ("tensor", "filter", "channel", "spatial", "sharded")
SAMPLES = 4


def random_model(random: Random, num_layers: int) -> ModelProfile:
    """A chain whose layers can be split by channels and by planes, with times up to a hundred times those of messages."""
    profile = random_profile(random, num_layers, (1, 4))
    shape = LayerShape(in_channels=8, out_channels=8, in_planes=16, out_planes=16, window=3, padding=1)
    factor = random.choice([1, 10, 100])

    def longer(ns: int) -> int:
        return factor * ns

    measurements = tuple(
        replace(
            each,
            layers=tuple(
                replace(
                    m,
                    forward_ns=longer(m.forward_ns),
                    input_grad_ns=longer(m.input_grad_ns),
                    weight_grad_ns=longer(m.weight_grad_ns),
                )
                for m in each.layers
            ),
        )
        for each in profile.measurements
    )
    layers = tuple(replace(layer, shape=shape) for layer in profile.layers)
    return replace(profile, layers=layers, measurements=measurements)


def host(num: int, num_members: int, link: Bandwidth) -> Cluster:
    """Devices of one host in groups of so many, written out."""
    names = [f"d{i}" for i in range(num)]
    parts = [names[i : i + num_members] for i in range(0, num, num_members)]
    return Cluster(
        devices=tuple(
            Device(
                name="+".join(part),
                host="h",
                kind="a",
                memory_bytes=10**9,
                members=tuple(part) if num_members > 1 else msgspec.UNSET,
            )
            for part in parts
        ),
        intra_host=link,
        inter_host=link,
    )


def every_step_ns(profile: ModelProfile, cluster: Cluster, some_plan: bapipe.Plan) -> Iterator[int]:
    """The step of every plan of 1F1B and GPipe on the first devices, which are alike."""
    tree, known = msgspec.to_builtins(some_plan), {"a": msgspec.to_builtins(profile)}
    tree["cluster"] = msgspec.to_builtins(cluster)
    layers, names = [layer.name for layer in profile.layers], [device.name for device in cluster.devices]
    for size in (size for size in (1, 2, 4) if profile.microbatch_sizes[0] <= size):
        for counts in counts_of(len(names), min(len(names), SAMPLES // size)):
            ranks = [tuple(range(sum(counts[:s]), sum(counts[: s + 1]))) for s in range(len(counts))]
            for schedule in ("1f1b", "gpipe"):
                table = place_schedule(schedule, ranks, SAMPLES // size, len(names))
                tree["order"] = [list(map(str, actions)) for actions in table.order]
                tree |= {"schedule": schedule, "microbatch_size": size, "num_microbatches": SAMPLES // size}
                for inner in combinations(range(1, len(layers)), len(counts) - 1):
                    cuts = (0, *inner, len(layers))
                    tree["stages"] = [
                        {
                            "layers": layers[cuts[s] : cuts[s + 1]],
                            "devices": [names[rank] for rank in ranks[s]],
                            "recompute": False,
                        }
                        for s in range(len(counts))
                    ]
                    yield reference(tree, known)["step_ns"]


def counts_of(most: int, most_replicas: int) -> Iterator[tuple[int, ...]]:
    for first in range(1, min(most, most_replicas) + 1):
        yield (first,)
        yield from ((first, *rest) for rest in counts_of(most - first, most_replicas))


def test_no_plan_of_any_groups_is_faster() -> None:
    sizes_chosen = set()
    for seed, (num_devices, num_layers) in enumerate([(4, 8), (4, 5), (4, 4), (4, 3), (2, 8), (4, 2), (4, 3), (4, 3)]):
        random = Random(seed)
        link = Bandwidth(bytes_per_s=random.choice([10**8, 10**10]), latency_ns=random.choice([0, 10]))
        single, one_by_one = random_model(random, num_layers), host(num_devices, 1, link)
        profiles = {1: single}
        for num_members in (2, 4):
            try:
                profiles[num_members] = estimate(single, random.choice(SPLITS), num_members, one_by_one)
            except BapipeError:
                continue  # more members than devices, or than samples
        options = PlanOptions(minibatch_size=SAMPLES)
        best = bapipe.plan(list(profiles.values()), one_by_one, options)
        least_ns = min(
            step_ns
            for num_members, profile in profiles.items()
            for step_ns in every_step_ns(profile, host(num_devices, num_members, link), best)
        )
        assert best.prediction.step_ns == least_ns, seed
        assert best.certificate.lower_bound_ns == least_ns
        sizes_chosen.add(max(device.num_members for device in best.cluster.devices))
    assert sizes_chosen == {1, 2, 4}, sizes_chosen
