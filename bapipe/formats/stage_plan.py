"""A stage of a plan: its layers, the devices that run it, and what it recomputes."""

from collections.abc import Iterable, Sequence

import msgspec

from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import LOSS
from bapipe.printable import counted


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a stage, the devices that run it, and whether its backward recomputes its forward.

    Attributes:
        recompute_layers: with `recompute`, those of its layers that are recomputed: some, but not the loss; the others
            keep their stashes. If left out, the whole stage is recomputed from its input.
    """

    layers: tuple[str, ...]
    devices: tuple[str, ...]
    recompute: bool = False
    recompute_layers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The layers that are recomputed."""
        if not self.recompute:
            return ()
        return self.layers if self.recompute_layers is msgspec.UNSET else self.recompute_layers


def has_idle_replicas(num_replicas: Iterable[int], num_microbatches: int) -> bool:
    """Returns whether a stage has more replicas than there are micro-batches, so that some would run none."""
    return max(num_replicas) > num_microbatches


def check_replicas(stages: Sequence[StagePlan], minibatch_size: int, microbatch_size: int) -> None:
    """Raises BapipeError if replicas of a stage have no micro-batch."""
    num_microbatches = minibatch_size // microbatch_size
    for index, stage in enumerate(stages):
        num_devices = len(stage.devices)
        if has_idle_replicas((num_devices,), num_microbatches):
            smaller = "smaller micro-batches, " if microbatch_size > 1 else ""
            raise BapipeError(
                f"stage {index} has {num_devices} devices for {counted(num_microbatches, 'micro-batch')} of "
                f"{microbatch_size}, so some would compute nothing: take {smaller}a mini-batch of at least "
                f"{num_devices * microbatch_size}, or fewer devices for the stage"
            )


def check_stages(stages: tuple[StagePlan, ...], cluster: Cluster) -> None:
    """Raises InvalidFile if there is no stage, a layer is in two, or a stage is empty or on an unknown device."""
    if not stages:
        raise InvalidFile("a plan needs at least one stage", "$.stages")
    placed: set[str] = set()
    known = cluster.index
    for index, stage in enumerate(stages):
        where = f"$.stages[{index}]"
        if not stage.layers:
            raise InvalidFile("a stage needs at least one layer", f"{where}.layers")
        for name in stage.layers:
            if name in placed:
                raise InvalidFile(f"layer '{name}' is in two places", f"{where}.layers")
            placed.add(name)
        if not stage.devices:
            raise InvalidFile("a stage needs at least one device", f"{where}.devices")
        if len(set(stage.devices)) != len(stage.devices):
            raise InvalidFile("a device is named twice", f"{where}.devices")
        for name in stage.devices:
            if name not in known:
                raise InvalidFile(f"'{name}' is not a device of the plan's cluster", f"{where}.devices")
        _check_recomputation(stage, f"{where}.recompute_layers")


def _check_recomputation(stage: StagePlan, where: str) -> None:
    named = stage.recompute_layers
    if named is msgspec.UNSET:
        return
    if not stage.recompute:
        raise InvalidFile("the stage names layers that are recomputed, but 'recompute' is false", where)
    if not named or len(set(named)) != len(named):
        raise InvalidFile("want one or more layers, each once; leave it out to recompute the whole stage", where)
    for name in named:
        if name == LOSS:
            raise InvalidFile("the loss can be recomputed with its whole stage only", where)
        if name not in stage.layers:
            raise InvalidFile(f"'{name}' is not a layer of the stage", where)
    if len(named) == len(stage.layers):
        raise InvalidFile("these are all layers of the stage: leave it out to recompute the whole stage", where)
