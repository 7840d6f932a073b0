"""The profile of a model in which a block of layers occurs several times in a row."""

from collections.abc import Iterable, Sequence

import msgspec

from bapipe.errors import BapipeError
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import Measurement
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ESTIMATE, ModelProfile


def block_layers(profile: ModelProfile, block: str) -> range:
    """Returns the numbers of the layers of a block, which lie next to each other.

    Args:
        block: the name of a layer, what names begin with (`h.3` for `h.3.attn` and `h.3.mlp`), or `FIRST..LAST`, where
            both ends may be either.

    Raises:
        BapipeError: no such layers, others between them, or a range that ends before it begins.
    """
    names = [layer.name for layer in profile.layers]
    first, dots, last = block.partition("..")
    found = _named(names, block)
    if dots and not found:
        return _range(profile, block, first, last)
    if not found:
        raise BapipeError(
            f"`largest` '{block}': no layers of {profile.model} have this name; want that of a layer, what the names "
            f"of several begin with, or FIRST..LAST; the first layers are {', '.join(names[:4])}"
        )
    if found[-1] - found[0] + 1 != len(found):
        other = next(names[i] for i in range(found[0], found[-1]) if i not in found)
        raise BapipeError(f"`largest` '{block}': layer '{other}' lies between its layers; name them as FIRST..LAST")
    return range(found[0], found[-1] + 1)


def _named(names: Sequence[str], text: str) -> list[int]:
    """Returns the numbers of the layers that have a name, or whose names begin with it."""
    return [i for i, name in enumerate(names) if name == text or name.startswith((f"{text}.", f"{text}_"))]


def _range(profile: ModelProfile, block: str, first: str, last: str) -> range:
    """Returns the layers from the first one of an end to the last one of the other."""
    names = [layer.name for layer in profile.layers]
    ends = []
    for text in (first, last):
        found = [names.index(text)] if text in names else _named(names, text)
        if not found:
            raise BapipeError(
                f"`largest` '{block}': no layer of {profile.model} is named '{text}', and no "
                f"name begins with it; the first layers are {', '.join(names[:4])}"
            )
        ends.append(found)
    begin, end = ends[0][0], ends[1][-1] + 1
    if begin >= end:
        raise BapipeError(
            f"`largest` '{block}' ends before it begins: layer '{names[end - 1]}' comes before '{names[begin]}'; want "
            f"'{last}..{first}'"
        )
    return range(begin, end)


def repeat_block(profile: ModelProfile, block: str, copies: int) -> ModelProfile:
    """Returns a profile in which each copy of a block reads what the copy before it gives.

    Args:
        copies: how many there are together with the profile's own.

    Raises:
        BapipeError: what the block gives cannot be its next copy's input, or it shares parameters with other layers.
    """
    layers = block_layers(profile, block)
    given, read = _ends(profile, block, layers)
    own = profile.layers[layers.start : layers.stop]
    made = {tensor for layer in own for tensor in layer.outputs}
    after = tuple(_renamed_inputs(layer, {given: _copy_of(given, copies)}) for layer in profile.layers[layers.stop :])
    repeated: list[LayerProfile] = []
    for copy in range(1, copies + 1):
        tensors = {tensor: _copy_of(tensor, copy) for tensor in made}
        tensors[read] = read if copy == 1 else _copy_of(given, copy - 1)
        repeated += [_copied(layer, tensors, copy) for layer in own]
    return msgspec.structs.replace(
        profile,
        model=f"{profile.model} with {copies} x {block}",
        factory=None,  # it makes the model with one copy
        arguments={},
        environment=profile.environment
        | {ESTIMATE: f"an estimate of {copies} copies of '{block}', each with the times and bytes of the first"},
        layers=(*profile.layers[: layers.start], *repeated, *after),
        measurements=tuple(
            Measurement(
                microbatch_size=m.microbatch_size,
                layers=(
                    *m.layers[: layers.start],
                    *m.layers[layers.start : layers.stop] * copies,
                    *m.layers[layers.stop :],
                ),
            )
            for m in profile.measurements
        ),
    )


def profiles_of_copies(plan: Plan, profiles: tuple[ModelProfile, ...]) -> tuple[ModelProfile, ...]:
    """Returns the profiles that a plan was made from, given those of the model before its block was repeated."""
    goal = plan.certificate.goal
    if goal is msgspec.UNSET or goal.quantity != "copies" or goal.value == 1:
        return profiles
    return tuple(repeat_block(profile, goal.of, goal.value) for profile in profiles)


def _ends(profile: ModelProfile, block: str, layers: range) -> tuple[str, str]:
    """Returns the tensor that a block gives to later layers, and the one of the same size that it reads."""
    own = profile.layers[layers.start : layers.stop]
    names = {layer.name for layer in own}
    if any(layer.shares and (layer.name in names or names & set(layer.shares)) for layer in profile.layers):
        raise BapipeError(f"`largest` '{block}': its layers share parameters with others; choose a block without those")
    made = {tensor for layer in own for tensor in layer.outputs}
    later = {tensor for layer in profile.layers[layers.stop :] for tensor in layer.inputs}
    given = sorted(made & later)
    if len(given) != 1:
        raise BapipeError(
            f"`largest` '{block}': want a block that gives one tensor to later layers; it gives {len(given)}"
        )
    sizes = _sizes(profile)
    # A block may also read tensors that all its copies read, such as a mask: the latest of that size is the chain's.
    read = [t for layer in own for t in layer.inputs if t not in made and sizes.get(t) == sizes[given[0]]]
    if not read:
        raise BapipeError(
            f"`largest` '{block}': it reads no tensor as large as the one it gives, so no copy can follow it; choose a "
            "block whose input and output are alike"
        )
    position = {tensor: i for i, layer in enumerate(profile.layers) for tensor in layer.outputs}
    return given[0], max(read, key=position.__getitem__)


def _sizes(profile: ModelProfile) -> dict[str, tuple[int, ...]]:
    """Returns the bytes of each tensor that a layer makes, at each measured micro-batch size."""
    found: dict[str, tuple[int, ...]] = {}
    for i, layer in enumerate(profile.layers):
        for j, tensor in enumerate(layer.outputs):
            found[tensor] = tuple(m.layers[i].output_bytes[j] for m in profile.measurements)
    return found


def _copy_of(name: str, copy: int) -> str:
    return name if copy == 1 else f"{name}#{copy}"


def _copied(layer: LayerProfile, tensors: dict[str, str], copy: int) -> LayerProfile:
    renamed = _renamed_inputs(layer, tensors)
    return msgspec.structs.replace(
        renamed,
        name=_copy_of(layer.name, copy),
        outputs=_renamed(layer.outputs, tensors),
        no_gradient=_renamed(layer.no_gradient, tensors),
    )


def _renamed_inputs(layer: LayerProfile, tensors: dict[str, str]) -> LayerProfile:
    shape = layer.shape
    if shape is not msgspec.UNSET:
        names = _renamed(shape.elementwise_inputs, tensors)
        shape = msgspec.structs.replace(shape, elementwise_inputs=names)
    return msgspec.structs.replace(layer, inputs=_renamed(layer.inputs, tensors), shape=shape)


def _renamed(names: Iterable[str], tensors: dict[str, str]) -> tuple[str, ...]:
    return tuple(tensors.get(name, name) for name in names)
