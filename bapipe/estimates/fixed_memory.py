"""What of a layer's memory does not grow with the samples: new gradients, weights copied to another precision."""

from collections.abc import Callable
from dataclasses import dataclass

from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMemory:
    """Bytes of a layer's stash and of its workspace that do not grow with the samples."""

    stash_bytes: int = 0
    workspace_bytes: int = 0


def fixed_memory(profile: ModelProfile) -> list[FixedMemory]:
    """Returns for each layer what a line through its two smallest micro-batches leaves at no samples.

    The workspace has at least a new gradient of the layer's parameters, before it is added to the one that is kept, be
    they shared with another layer or not; of a profile of one micro-batch size nothing else is known.
    """
    first, second = profile.measurements[0], profile.measurements[min(1, len(profile.measurements) - 1)]
    a, b = first.microbatch_size, second.microbatch_size

    def at_no_samples(num_bytes: Callable[[LayerMeasurement], int], layer: int) -> int:
        if a == b:
            return 0
        of_first, of_second = num_bytes(first.layers[layer]), num_bytes(second.layers[layer])
        return max(0, (of_first * b - of_second * a) // (b - a))

    return [
        FixedMemory(
            stash_bytes=at_no_samples(lambda m: m.stash_bytes, i),
            workspace_bytes=max(
                at_no_samples(lambda m: m.workspace_bytes, i), layer.gradient_bytes + layer.shared_gradient_bytes
            ),
        )
        for i, layer in enumerate(profile.layers)
    ]
