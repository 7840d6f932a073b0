"""What changed from one profile of a model to another: which layers, and by how much."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from rich.table import Table

from bapipe.formats.profile import LayerMeasurement, ModelProfile
from bapipe.report import empty_table, mib, ms

SURE = 0.02
"""Relative change of a time that counts where a profile does not say how sure it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """A layer at one micro-batch size in both profiles.

    Attributes:
        surely: whether F + B differ by more than the two profiles' own uncertainty.
    """

    name: str
    microbatch_size: int
    before: LayerMeasurement
    after: LayerMeasurement
    surely: bool

    @property
    def more_ns(self) -> int:
        """What F + B take longer."""
        return _ns(self.after) - _ns(self.before)

    @property
    def more_bytes(self) -> tuple[int, int, int]:
        """What stash, workspace and outputs take more."""
        a, b = self.before, self.after
        outputs = sum(b.output_bytes) - sum(a.output_bytes)
        return b.stash_bytes - a.stash_bytes, b.workspace_bytes - a.workspace_bytes, outputs


def layer_changes(before: ModelProfile, after: ModelProfile, microbatch_size: int) -> tuple[LayerChange, ...]:
    """Returns the layers of both profiles at a size that both have, the largest change of time first."""
    one = dict(zip((layer.name for layer in before.layers), before.at(microbatch_size), strict=True))
    other = dict(zip((layer.name for layer in after.layers), after.at(microbatch_size), strict=True))
    changes = [
        LayerChange(
            name=name, microbatch_size=microbatch_size, before=a, after=other[name], surely=_surely(a, other[name])
        )
        for name, a in one.items()
        if name in other
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.more_ns)))


def _ns(layer: LayerMeasurement) -> int:
    return layer.forward_ns + layer.whole_backward_ns


def _surely(a: LayerMeasurement, b: LayerMeasurement) -> bool:
    unsure_ns = sum(_ns(m) * (SURE / 2 if m.spread is msgspec.UNSET else m.spread) for m in (a, b))
    return abs(_ns(b) - _ns(a)) > unsure_ns


def render_profile_diff(before: ModelProfile, after: ModelProfile) -> Iterator[Table | str]:
    """Yields how two profiles differ: how they were made, their layers, and at each common size times and bytes."""
    yield f"{before.model} on {before.device.name}, then {after.model} on {after.device.name}"
    for name, a, b in _made(before, after):
        yield f"{name}: {a}, then {b}"
    names = [layer.name for layer in before.layers], [layer.name for layer in after.layers]
    for what, own, other in (("only in the first", *names), ("only in the second", *reversed(names))):
        if gone := [name for name in own if name not in set(other)]:
            yield f"{what}: {', '.join(gone)}"
    sizes = [size for size in before.microbatch_sizes if size in after.microbatch_sizes]
    if not sizes:
        yield f"no common micro-batch size: {before.microbatch_sizes}, then {after.microbatch_sizes}"
    for size in sizes:
        yield from _at(layer_changes(before, after, size), size)


def _made(before: ModelProfile, after: ModelProfile) -> Iterator[tuple[str, object, object]]:
    one, other = (
        {"dtype": p.dtype, "optimizer": p.optimizer}
        | ({} if p.settings is msgspec.UNSET else msgspec.to_builtins(p.settings))
        | {key: value for key, value in p.environment.items() if isinstance(value, str | int)}
        for p in (before, after)
    )
    for name in dict.fromkeys((*one, *other)):
        if one.get(name) != other.get(name):
            yield name, one.get(name), other.get(name)


def _at(changes: tuple[LayerChange, ...], size: int) -> Iterator[Table | str]:
    times = [sum(_ns(m) for m in side) for side in zip(*((c.before, c.after) for c in changes), strict=True)] or [0, 0]
    relative = f" ({times[1] / times[0] - 1:+.1%})" if times[0] else ""
    shown = [change for change in changes if change.surely or any(change.more_bytes)]
    yield (
        f"micro-batches of {size}: F + B {ms(times[0])}, then {ms(times[1])}{relative}; "
        f"{len(shown)} of {len(changes)} layers changed"
    )
    if not shown:
        return
    heads = "F + B ms>", "then>", "change>", "± %>", "stash>", "work>", "output>"
    rows = empty_table(f"what changed at {size}, most first; sizes in MiB", "layer", *heads)
    for change in shown:
        before_ns, after_ns = _ns(change.before), _ns(change.after)
        spreads = [m.spread for m in (change.before, change.after) if m.spread is not msgspec.UNSET]
        rows.add_row(
            change.name,
            ms(before_ns).removesuffix(" ms"),
            ms(after_ns).removesuffix(" ms"),
            f"{after_ns / before_ns - 1:+.1%}" if change.surely and before_ns else "",
            f"{100 * sum(spreads):.1f}" if spreads else "",
            *(
                f"{'+' if more > 0 else '-'}{mib(abs(more)).removesuffix(' MiB')}" if more else ""
                for more in change.more_bytes
            ),
        )
    yield rows
