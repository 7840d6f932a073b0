"""Layers that share parameters, such as tied embeddings: what it costs to have them in different stages."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from bapipe.formats.profile import LayerProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedGradient:
    """A gradient that several stages each have a part of, to be summed before any of them updates.

    Attributes:
        owner: the layer that counts the parameters.
    """

    owner: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeightCost:
    """What sharing adds to one stage.

    Attributes:
        gradients: those that it has in common with other stages.
        param_bytes, optimizer_bytes, update_ns: of the copies it holds of what a layer of another stage counts.
    """

    gradients: tuple[TiedGradient, ...] = ()
    param_bytes: int = 0
    optimizer_bytes: int = 0
    update_ns: int = 0


class TiedWeights:
    """The layers of a model that share parameters, in groups: the one that counts them, and those that use them too."""

    def __init__(self, layers: Sequence[LayerProfile]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._users: dict[str, list[LayerProfile]] = {}
        for layer in layers:
            if layer.shared_bytes:
                owner = next(name for name in layer.shares if not self._layers[name].shared_bytes)
                self._users.setdefault(owner, []).append(layer)

    def copies(self) -> Iterator[tuple[LayerProfile, list[LayerProfile], TiedWeightCost]]:
        """Yields each layer that counts shared parameters, who else uses them, and what a copy of them takes."""
        for name, users in self._users.items():
            owner, num_bytes = self._layers[name], max(user.shared_bytes for user in users)
            yield (
                owner,
                users,
                TiedWeightCost(
                    gradients=(TiedGradient(owner=name, num_bytes=num_bytes),),
                    param_bytes=num_bytes,
                    optimizer_bytes=owner.optimizer_state_bytes * num_bytes // owner.param_bytes,
                    update_ns=owner.update_ns * num_bytes // owner.param_bytes,
                ),
            )

    def of(self, stage: Container[str]) -> TiedWeightCost:
        """Returns what sharing adds to a stage of the given layers."""
        gradients: list[TiedGradient] = []
        copied = []
        for owner, users, copy in self.copies():
            inside = [owner.name in stage, *(user.name in stage for user in users)]
            if any(inside) and not all(inside):
                gradients += copy.gradients
                copied += [] if inside[0] else [copy]
        return TiedWeightCost(
            gradients=tuple(gradients),
            param_bytes=sum(copy.param_bytes for copy in copied),
            optimizer_bytes=sum(copy.optimizer_bytes for copy in copied),
            update_ns=sum(copy.update_ns for copy in copied),
        )


def inseparable_layers(layers: Sequence[LayerProfile]) -> Iterator[tuple[int, int]]:
    """Yields the places of layers that share parameters of which no layer says how large they are."""
    place = {layer.name: i for i, layer in enumerate(layers)}
    for i, layer in enumerate(layers):
        for name in layer.shares:
            if i < place[name] and not (layer.shared_bytes or layers[place[name]].shared_bytes):
                yield i, place[name]
