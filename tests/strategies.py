"""Hypothesis strategies for planning problems: a failure prints the smallest profile, cluster and problem that shows it.

The builders draw from a `Random`; here every draw is a choice of hypothesis, so that it can make the case smaller.
Examples are the same in every run (`derandomize`), and none is kept between runs; importing this module also keeps the
constants of whatever modules are loaded out of them, which would let the tests before decide what a test tries.
"""

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from tests.oracles.random_plans import case_of
from tests.random_pipelines import Pipeline, random_pipeline
from tests.random_profiles import random_cluster, random_profile

T = TypeVar("T")

# Hypothesis has no setting for this.
HypothesisProvider._local_constants = Constants()  # type: ignore[assignment]


def examples(count: int) -> settings:
    """Returns the settings of a property that is tried on this many cases."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


def drawn(build: Callable[[Random], T]) -> st.SearchStrategy[T]:
    """Returns the strategy of the values that a builder makes from a source of random choices."""
    return st.randoms(use_true_random=False).map(build)


def profiles(max_layers: int, **options: Any) -> st.SearchStrategy[ModelProfile]:
    """Chains of 1 to `max_layers` layers, some with skip connections."""
    return drawn(lambda random: random_profile(random, random.randint(1, max_layers), **options))


def clusters(max_devices: int, kinds: tuple[str, ...] = ("a",)) -> st.SearchStrategy[Cluster]:
    """1 to `max_devices` devices of several speeds on up to three hosts."""
    return drawn(lambda random: random_cluster(random, random.randint(1, max_devices), kinds))


def pipelines(ranks: tuple[int, ...], num_microbatches: int, **options: Any) -> st.SearchStrategy[Pipeline]:
    """Pipelines with stage s on rank ranks[s]."""
    return drawn(lambda random: random_pipeline(random, ranks, num_microbatches, **options))


def plans_and_profiles() -> st.SearchStrategy[tuple[dict[str, Any], dict[str, Any]]]:
    """Legal plans with their profiles, as decoded JSON."""
    return drawn(case_of)
