"""The difference of two profiles of a model: which layers changed, and by how much."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from rich.table import Table

from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile
from bapipe.printable import MAX_LINE, printable
from bapipe.report.formatting import add_row, empty_table, mib, ms
from bapipe.units import percent_change

MIN_CHANGE = 0.02
"""Relative change of a time that is significant if the profiles do not record a spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """A layer at one micro-batch size in both profiles.

    Attributes:
        is_significant: whether F + B differ by more than the spreads of the two measurements together.
    """

    name: str
    microbatch_size: int
    before: LayerMeasurement
    after: LayerMeasurement
    is_significant: bool

    @property
    def added_ns(self) -> int:
        """Time of F + B after, minus before."""
        return self.after.forward_backward_ns - self.before.forward_backward_ns

    @property
    def added_bytes(self) -> tuple[int, int, int]:
        """Bytes of stash, workspace and outputs after, minus before."""
        a, b = self.before, self.after
        outputs = sum(b.output_bytes) - sum(a.output_bytes)
        return b.stash_bytes - a.stash_bytes, b.workspace_bytes - a.workspace_bytes, outputs


def layer_changes(before: ModelProfile, after: ModelProfile, microbatch_size: int) -> tuple[LayerChange, ...]:
    """Returns the layers of both profiles at a size that both have, the largest change of time first."""
    layers_before = dict(zip((layer.name for layer in before.layers), before.at(microbatch_size), strict=True))
    layers_after = dict(zip((layer.name for layer in after.layers), after.at(microbatch_size), strict=True))
    changes = [
        LayerChange(
            name=name,
            microbatch_size=microbatch_size,
            before=a,
            after=layers_after[name],
            is_significant=_is_significant(a, layers_after[name]),
        )
        for name, a in layers_before.items()
        if name in layers_after
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.added_ns)))


def _is_significant(a: LayerMeasurement, b: LayerMeasurement) -> bool:
    spreads = (MIN_CHANGE / 2 if m.spread is msgspec.UNSET else m.spread for m in (a, b))
    uncertainty_ns = sum(m.forward_backward_ns * spread for m, spread in zip((a, b), spreads, strict=True))
    return abs(b.forward_backward_ns - a.forward_backward_ns) > uncertainty_ns


def render_profile_diff(before: ModelProfile, after: ModelProfile) -> Iterator[Table | str]:
    """Yields the differences of two profiles: settings, layers, and times and bytes at each common size."""
    yield printable(f"{before.model} on {before.device.name}, then {after.model} on {after.device.name}", MAX_LINE)
    for name, a, b in _setting_changes(before, after):
        yield printable(f"{name}: {a}, then {b}", MAX_LINE)
    names_before, names_after = ([layer.name for layer in profile.layers] for profile in (before, after))
    if removed := [name for name in names_before if name not in set(names_after)]:
        yield printable(f"only in the first: {', '.join(removed)}", MAX_LINE)
    if added := [name for name in names_after if name not in set(names_before)]:
        yield printable(f"only in the second: {', '.join(added)}", MAX_LINE)
    sizes = [size for size in before.microbatch_sizes if size in after.microbatch_sizes]
    if not sizes:
        yield f"no common micro-batch size: {before.microbatch_sizes}, then {after.microbatch_sizes}"
    for size in sizes:
        yield from _render_size(layer_changes(before, after, size), size)


def _setting_changes(before: ModelProfile, after: ModelProfile) -> Iterator[tuple[str, object, object]]:
    """Yields (name, before, after) of each setting and each value of the environment that differs."""
    first, second = (
        {"dtype": p.dtype, "optimizer": p.optimizer}
        | ({} if p.settings is msgspec.UNSET else msgspec.to_builtins(p.settings))
        | {key: value for key, value in p.environment.items() if isinstance(value, str | int)}
        for p in (before, after)
    )
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def _render_size(changes: tuple[LayerChange, ...], size: int) -> Iterator[Table | str]:
    total_before_ns = sum(change.before.forward_backward_ns for change in changes)
    total_after_ns = sum(change.after.forward_backward_ns for change in changes)
    relative = f" ({percent_change(total_after_ns / total_before_ns - 1)})" if total_before_ns else ""
    shown = [change for change in changes if change.is_significant or any(change.added_bytes)]
    yield (
        f"micro-batches of {size}: F + B {ms(total_before_ns)}, then {ms(total_after_ns)}{relative}; "
        f"{len(shown)} of {len(changes)} layers changed"
    )
    if not shown:
        return
    heads = "F + B ms>", "then>", "change>", "± %>", "stash>", "work>", "output>"
    table = empty_table(f"changes at {size}, the largest first; sizes in MiB", "layer", *heads)
    for change in shown:
        before_ns, after_ns = change.before.forward_backward_ns, change.after.forward_backward_ns
        spreads = [m.spread for m in (change.before, change.after) if m.spread is not msgspec.UNSET]
        add_row(
            table,
            change.name,
            ms(before_ns).removesuffix(" ms"),
            ms(after_ns).removesuffix(" ms"),
            percent_change(after_ns / before_ns - 1) if change.is_significant and before_ns else "",
            f"{100 * sum(spreads):.1f}" if spreads else "",
            *(
                f"{'+' if added > 0 else '-'}{mib(abs(added)).removesuffix(' MiB')}" if added else ""
                for added in change.added_bytes
            ),
        )
    yield table
