"""Problems of the branch and bound for random chains: the whole space of some schedules at one or two sizes."""

from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.inputs.options import PlanOptions
from tests.random_profiles import of_groups, random_cluster, random_profile, with_exchanges, with_host_times
from tests.strategies import drawn


def random_problems(seed: int, schedules: Sequence[str] = ("1f1b", "gpipe"), **options: Any) -> tuple[Problem, ...]:
    """The problems of one seed; a quarter of the profiles have two layers that share parameters."""
    shares = seed % 4 == 3
    return draw_problems(Random(seed), schedules, shares=shares, latency_ns=seed, **options)


def problems_of(schedules: Sequence[str] = ("1f1b", "gpipe"), **options: Any) -> st.SearchStrategy[tuple[Problem, ...]]:
    """The strategy of the problems that `draw_problems` makes; of an option that is None, both values occur."""

    def build(random: Random) -> tuple[Problem, ...]:
        shares, latency_ns = random.random() < 0.25, random.randrange(30)
        either = {"splits_badly": random.random() < 0.5, "buckets": random.random() < 0.2}
        defaults = {"splits_badly": None, "buckets": False} | options
        chosen = {name: either[name] if value is None else value for name, value in defaults.items()}
        return draw_problems(random, schedules, shares=shares, latency_ns=latency_ns, **chosen)

    return drawn(build)


def draw_problems(
    random: Random,
    schedules: Sequence[str],
    *,
    shares: bool,
    latency_ns: int,
    max_layers: int = 6,
    max_devices: int = 3,
    splits_badly: bool = False,
    buckets: bool = False,
    host_sum_link: bool = False,
    frozen: bool = False,
    host_times: bool = False,
    exchanges: bool = False,
    limit: int = 2**40,
) -> tuple[Problem, ...]:
    """The whole space of some schedules at one or two micro-batch sizes."""
    num_layers = random.randint(1, max_layers)
    profile = random_profile(random, num_layers, splits_badly=splits_badly, shares=shares, frozen=frozen)
    profile = with_host_times(random, profile) if host_times else profile
    cluster = random_cluster(random, random.randint(1, max_devices))
    if exchanges:
        profile, cluster = with_exchanges(random, profile), of_groups(cluster)
    if buckets:
        profile, cluster = heavy(profile), heavy_duty(cluster)
    if host_sum_link:
        cluster = replace(
            cluster, intra_host_sum=Bandwidth(bytes_per_s=10**15 if buckets else 10**9, latency_ns=latency_ns)
        )
    num_samples = 4 * random.randint(1, 2)
    sizes = [size for size in random.sample([1, 2, 3, 4], 2) if num_samples % size == 0]
    return build_space(
        {"a": profile},
        cluster,
        PlanOptions(
            minibatch_size=num_samples,
            schedules=schedules,
            memory_limit_bytes=limit,
            replicas=random.random() < 0.8,
            recompute=random.random() < 0.7,
        ),
        sizes=sizes,
    ).problems


def heavy(profile: ModelProfile) -> ModelProfile:
    """The profile with parameters of many megabytes, so that all-reduces take several buckets."""

    def enlarged(layer: LayerProfile) -> LayerProfile:
        trained = layer.trained_bytes if layer.trained_bytes is UNSET else layer.trained_bytes * 2**20
        return replace(layer, param_bytes=layer.param_bytes * 2**20, trained_bytes=trained)

    return replace(profile, layers=tuple(map(enlarged, profile.layers)))


def heavy_duty(cluster: Cluster) -> Cluster:
    """The cluster with memory for that, and links on which it takes as long as the layers."""
    fast = replace(cluster.intra_host, bytes_per_s=10**15)
    devices = tuple(replace(device, memory_bytes=2**32) for device in cluster.devices)
    return replace(cluster, devices=devices, intra_host=fast, inter_host=fast, links=())
