"""Random profiles whose layers branch and join, the same for the same seed."""

from random import Random

import msgspec

from bapipe.formats.profile import ModelProfile
from tests.random_profiles import random_profile


def branching_profile(random: Random, num_layers: int, sizes: tuple[int, ...] = (1, 2)) -> ModelProfile:
    """Every layer but the first uses one to three earlier ones; some give no gradient, some share parameters."""
    profile = random_profile(random, num_layers, sizes)
    layers = []
    for i, layer in enumerate(profile.layers):
        uses = random.sample(range(i), min(i, random.choice([1, 1, 1, 2, 3])))
        layers.append(msgspec.structs.replace(layer, inputs=tuple(f"t{j}" for j in sorted(uses)) or ("x",)))
    if num_layers > 2 and random.random() < 0.3:
        a, b = sorted(random.sample(range(num_layers), 2))
        layers[a] = msgspec.structs.replace(layers[a], shares=(f"l{b}",))
    return msgspec.structs.replace(profile, layers=tuple(layers))
