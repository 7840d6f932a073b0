"""Tied weights, parameters that several layers share such as embeddings: their cost if the layers are in two stages."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from bapipe.formats.layer_profile import LayerProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedGradient:
    """The gradient of tied weights of which several stages have a copy; they sum it before any of them updates.

    Attributes:
        owner: the layer that counts the parameters. It tells gradients of equal size apart: stages with equal gradients
            sum them, see `simulate.py`.
        group_bytes: how many of the bytes the members of groups sum, too.
    """

    owner: str
    num_bytes: int
    group_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeightCost:
    """What tied weights add to one stage.

    Attributes:
        gradients: those that it sums with other stages.
        param_bytes, gradient_bytes, optimizer_bytes, update_ns: of its copies of parameters that a layer of another
            stage counts.
    """

    gradients: tuple[TiedGradient, ...] = ()
    param_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    update_ns: int = 0


class TiedWeights:
    """The layers of a model that share parameters, in groups: the owner, which counts them, and the other users."""

    def __init__(self, layers: Sequence[LayerProfile]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._users: dict[str, list[LayerProfile]] = {}
        for layer in layers:
            if layer.shared_bytes:
                owner = next(name for name in layer.shares if not self._layers[name].shared_bytes)
                self._users.setdefault(owner, []).append(layer)

    def copies(self) -> Iterator[tuple[LayerProfile, list[LayerProfile], TiedWeightCost]]:
        """Yields each owner, the other users of its parameters, and the cost of a copy of them."""
        for name, users in self._users.items():
            owner, num_bytes = self._layers[name], max(user.shared_gradient_bytes for user in users)
            trained_bytes = owner.gradient_bytes or 1  # 0 only if num_bytes is
            yield (
                owner,
                users,
                TiedWeightCost(
                    gradients=(_gradient(owner, num_bytes),) if num_bytes else (),
                    param_bytes=max(user.shared_bytes for user in users),
                    gradient_bytes=num_bytes,
                    optimizer_bytes=owner.optimizer_state_bytes * num_bytes // trained_bytes,
                    update_ns=owner.update_ns * num_bytes // trained_bytes,
                ),
            )

    def cost_of(self, stage: Container[str]) -> TiedWeightCost:
        """Returns what tied weights add to a stage of the given layers.

        A stage sums the gradient of a group that it has only some layers of; it has a copy of the parameters if the
        owner is not among them.
        """
        gradients: list[TiedGradient] = []
        copies = []
        for owner, users, copy in self.copies():
            in_stage = [owner.name in stage, *(user.name in stage for user in users)]
            if any(in_stage) and not all(in_stage):
                gradients += copy.gradients
                copies += [] if in_stage[0] else [copy]
        return TiedWeightCost(
            gradients=tuple(gradients),
            param_bytes=sum(copy.param_bytes for copy in copies),
            gradient_bytes=sum(copy.gradient_bytes for copy in copies),
            optimizer_bytes=sum(copy.optimizer_bytes for copy in copies),
            update_ns=sum(copy.update_ns for copy in copies),
        )


def _gradient(owner: LayerProfile, num_bytes: int) -> TiedGradient:
    """The gradient of so many of a layer's trained bytes; members of a group sum the same share of all of them."""
    group_bytes = owner.group_gradient_bytes * num_bytes // owner.gradient_bytes
    return TiedGradient(owner=owner.name, num_bytes=num_bytes, group_bytes=group_bytes)


def inseparable_layers(layers: Sequence[LayerProfile]) -> Iterator[tuple[int, int]]:
    """Yields the indices of two layers that share parameters whose size neither says: no cut may part them."""
    index_of = {layer.name: i for i, layer in enumerate(layers)}
    for i, layer in enumerate(layers):
        for name in layer.shares:
            if i < index_of[name] and not (layer.shared_bytes or layers[index_of[name]].shared_bytes):
                yield i, index_of[name]


def legal_cuts(layers: Sequence[LayerProfile]) -> list[int]:
    """Returns the cuts that part no inseparable layers, each as the number of layers before it, ascending.

    Neither end of the layers is among them.
    """
    forbidden = {cut for first, last in inseparable_layers(layers) for cut in range(first + 1, last + 1)}
    return [cut for cut in range(1, len(layers)) if cut not in forbidden]
