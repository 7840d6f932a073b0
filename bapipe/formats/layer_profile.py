"""A layer of a profile: what does not depend on the micro-batch size."""

import msgspec

from bapipe.errors import InvalidFile
from bapipe.formats.layer_shape import LayerShape
from bapipe.units import NonNegative


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer of the model graph: the figures that do not depend on the micro-batch size.

    Attributes:
        inputs, outputs: names of tensors; an input that is no layer's output is an input of the model.
        param_bytes: bytes of the parameters and buffers that no earlier layer uses.
        trained_bytes: how many of `param_bytes` are trained and have gradients. If left out, all.
        buffer_bytes: how many of `param_bytes` are buffers, which are not trained. If left out, none.
        update_ns: time of the optimizer's update of this layer.
        shares: names of the layers that share parameters with this one.
        shared_bytes: bytes of the parameters that another layer's `param_bytes` counts: the first layer of `shares`
            that has no `shared_bytes` itself.
        shared_trained_bytes: how many of `shared_bytes` are trained. If left out, all.
        no_gradient: the `outputs` that have no gradient (integers, masks, model constants).
        no_replicas: whether a forward leaves values here that the next forward reads (a moving average that quantises
            its inputs, a queue), so that replicas, which see some of the micro-batches each, would differ.
        group_sum_bytes: of a group, how many bytes of the gradients its members must sum once a step: all where they
            share the samples, none where they share the weights. If left out, none.
        shape: the channels and planes of a layer that a group can split; see `bapipe estimate`.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    param_bytes: NonNegative
    trained_bytes: NonNegative | msgspec.UnsetType = msgspec.UNSET
    buffer_bytes: NonNegative | msgspec.UnsetType = msgspec.UNSET
    optimizer_state_bytes: NonNegative
    update_ns: NonNegative = 0
    shares: tuple[str, ...] = ()
    shared_bytes: NonNegative = 0
    shared_trained_bytes: NonNegative | msgspec.UnsetType = msgspec.UNSET
    no_gradient: tuple[str, ...] = ()
    no_replicas: bool | msgspec.UnsetType = msgspec.UNSET
    group_sum_bytes: NonNegative | msgspec.UnsetType = msgspec.UNSET
    shape: LayerShape | msgspec.UnsetType = msgspec.UNSET

    @property
    def allows_replicas(self) -> bool:
        """Whether a stage with this layer may have replicas."""
        return self.no_replicas is not True

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters, trained or not, without buffers."""
        return self.param_bytes - (self.buffer_bytes or 0)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients: those of the trained parameters."""
        return self.param_bytes if self.trained_bytes is msgspec.UNSET else self.trained_bytes

    @property
    def group_gradient_bytes(self) -> int:
        """The bytes of the gradients that the members of a group sum."""
        return 0 if self.group_sum_bytes is msgspec.UNSET else self.group_sum_bytes

    def summed_bytes(self, *, has_replicas: bool) -> int:
        """The bytes of the gradients that are summed at all, over replicas or over the members of a group."""
        return self.gradient_bytes if has_replicas else self.group_gradient_bytes

    @property
    def shared_gradient_bytes(self) -> int:
        """The bytes of the gradients of the parameters that another layer counts."""
        return self.shared_bytes if self.shared_trained_bytes is msgspec.UNSET else self.shared_trained_bytes


def check_layers(layers: tuple[LayerProfile, ...]) -> None:
    """Raises InvalidFile if names are not unique or unknown, or a tensor is used before it is made."""
    all_outputs = {name for layer in layers for name in layer.outputs}
    names = {layer.name for layer in layers}
    seen: set[str] = set()
    made: set[str] = set()
    for index, layer in enumerate(layers):
        where = f"$.layers[{index}]"
        if layer.name in seen:
            raise InvalidFile(f"a second layer is named '{layer.name}'; names must be unique", f"{where}.name")
        seen.add(layer.name)
        for name in layer.inputs:
            if name in all_outputs and name not in made:
                raise InvalidFile(
                    f"tensor '{name}' is used before the layer that makes it; layers must be in "
                    "topological order, without cycles",
                    f"{where}.inputs",
                )
        for name in layer.outputs:
            if name in made:
                raise InvalidFile(f"tensor '{name}' is made twice", f"{where}.outputs")
            made.add(name)
        outputs = set(layer.outputs)
        for name in layer.no_gradient:
            if name not in outputs:
                raise InvalidFile(f"'{name}' is not an output of the layer", f"{where}.no_gradient")
        for name in layer.shares:
            if name not in names:
                raise InvalidFile(f"'{name}' is not a layer of the profile", f"{where}.shares")
    index_of = {layer.name: index for index, layer in enumerate(layers)}
    for index, layer in enumerate(layers):
        holders = sorted({index_of[name] for name in layer.shares if not layers[index_of[name]].shared_bytes})
        _check_bytes(layer, layers[holders[0]] if holders else None, f"$.layers[{index}]")
    for index, layer in enumerate(layers):
        for name in layer.inputs:
            if name in made or name not in names:
                continue
            raise InvalidFile(
                f"'{name}' is the name of a layer, but no layer gives a tensor of that name",
                f"$.layers[{index}].inputs",
            )


def _check_bytes(layer: LayerProfile, owner: LayerProfile | None, where: str) -> None:
    """Raises InvalidFile if a layer has more bytes of a kind than there are; `owner` counts the shared ones."""
    if layer.gradient_bytes > layer.param_bytes:
        raise InvalidFile(f"{layer.gradient_bytes} is more than `param_bytes`", f"{where}.trained_bytes")
    if layer.gradient_bytes > layer.weight_bytes:
        raise InvalidFile(
            f"{layer.buffer_bytes} is more than what is not trained of `param_bytes`", f"{where}.buffer_bytes"
        )
    if layer.shared_gradient_bytes > layer.shared_bytes:
        raise InvalidFile(f"{layer.shared_gradient_bytes} is more than `shared_bytes`", f"{where}.shared_trained_bytes")
    if not layer.shared_bytes:
        return
    for field, shared, held in (
        ("shared_bytes", layer.shared_bytes, owner.param_bytes if owner else 0),
        ("shared_trained_bytes", layer.shared_gradient_bytes, owner.gradient_bytes if owner else 0),
    ):
        if shared > held:
            raise InvalidFile(
                f"{shared} is more than the {held} bytes that the layer it shares them with counts", f"{where}.{field}"
            )
