"""A profile and a cluster as tables."""

from collections.abc import Iterator

import msgspec
from rich.table import Table
from rich.text import Text

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import (
    EQUIVALENCE,
    ESTIMATE,
    HALVED,
    HOST_OVER_DEVICE,
    LOSS_OVER_PARTS,
    ONE_LAYER,
    SHARED_BUFFERS,
    ModelProfile,
    has_host_times,
)
from bapipe.printable import MAX_LINE, are_one_layer, printable
from bapipe.report import layer_diagram
from bapipe.report.formatting import add_row, empty_table
from bapipe.units import number


def render_profile(profile: ModelProfile) -> Iterator[Table | str]:
    """Yields a profile's layers at its largest micro-batch size, and the totals at each size."""
    device = profile.device
    what = f"{profile.model} on {device.name} ({device.kind}), {profile.precision}, {profile.optimizer}"
    yield printable(what, MAX_LINE)
    if ESTIMATE in profile.environment:
        yield printable(str(profile.environment[ESTIMATE]), MAX_LINE)
    if EQUIVALENCE in profile.environment:
        yield printable(str(profile.environment[EQUIVALENCE]), MAX_LINE)
    if HALVED in profile.environment:
        yield printable(f"I and W are {profile.environment[HALVED]}", MAX_LINE)
    if LOSS_OVER_PARTS in profile.environment:
        yield printable(str(profile.environment[LOSS_OVER_PARTS]), MAX_LINE)
    if has_host_times(profile):
        yield _limit_words(profile)
    if isinstance(ratios := profile.environment.get(HOST_OVER_DEVICE), dict) and ratios:
        by_size = ", ".join(f"{ratio:.2f} ({size})" for size, ratio in ratios.items() if isinstance(ratio, float))
        yield printable(f"time by the clock on the wall over that of the GPU (micro-batch size): {by_size}", MAX_LINE)
    yield from _one_layer_words(profile)
    shared = profile.environment.get(SHARED_BUFFERS)
    for name, layers in shared.items() if isinstance(shared, dict) else ():
        if isinstance(layers, list) and layers:
            what = f"'{layers[0]}' to '{layers[-1]}' stay in one stage: {len(layers)} layers use the buffer '{name}'"
            yield printable(f"{what}, which training may change; a module for each of them has its own", MAX_LINE)
    largest = max(profile.measurements, key=lambda m: m.microbatch_size)
    title = f"layers, micro-batches of {largest.microbatch_size}: times in ms, sizes in MiB"
    heads = "F>", "I>", "W>", "B>", "± %>", "update>", "params>", "stash>", "for W>", "output>"
    table = empty_table(title, "layer", "kind", *heads)
    for layer, m in zip(profile.layers, largest.layers, strict=True):
        times = (m.forward_ns, m.input_grad_ns, m.weight_grad_ns, m.whole_backward_ns)
        sizes = (layer.param_bytes, m.stash_bytes, m.left_by_input_grad_bytes, sum(m.output_bytes))
        row = (
            *(number(t / 1e6) for t in times),
            "" if m.spread is msgspec.UNSET else f"{100 * m.spread:.1f}",
            number(layer.update_ns / 1e6),
            *(number(b / 2**20) for b in sizes),
        )
        add_row(table, layer.name, layer.kind, *row)
    yield table
    columns = "F ms>", "I ms>", "W ms>", "B ms>", "F + B per sample>", "stash MiB>"
    totals = empty_table("the whole model", "micro-batch>", *columns)
    for measured in sorted(profile.measurements, key=lambda m: m.microbatch_size):
        f = sum(m.forward_ns for m in measured.layers)
        i = sum(m.input_grad_ns for m in measured.layers)
        w = sum(m.weight_grad_ns for m in measured.layers)
        b = sum(m.whole_backward_ns for m in measured.layers)
        stash = sum(m.stash_bytes for m in measured.layers)
        size = measured.microbatch_size
        add_row(totals, str(size), *(number(t / 1e6) for t in (f, i, w, b, (f + b) / size)), number(stash / 2**20))
    yield totals
    yield shape_table(profile)


def _one_layer_words(profile: ModelProfile) -> Iterator[str]:
    """Yields which modules are one layer and why; those of one class for which the same is the reason together."""
    noted = profile.environment.get(ONE_LAYER)
    reasons = noted if isinstance(noted, dict) else {}
    kinds = {layer.name: layer.kind for layer in profile.layers}
    alike: dict[tuple[str, str], list[str]] = {}
    for path, reason in reasons.items():
        without_path = str(reason).replace(f"'{path}.", "'")
        alike.setdefault((kinds.get(path) or path, without_path), []).append(path)
    for (kind, _), paths in alike.items():
        yield printable(f"{are_one_layer(paths, kind)}: {reasons[paths[0]]}", MAX_LINE)


def _limit_words(profile: ModelProfile) -> str:
    """Returns from which micro-batch size on the device takes longer for F and B of the model than its host."""
    limit: int | None = None  # the smallest size from which on all are limited by the device
    for size in reversed(profile.microbatch_sizes):
        layers = profile.at(size)
        device_ns = sum(m.forward_backward_ns for m in layers)
        if device_ns < sum(m.host.forward_ns + m.host.backward_ns for m in layers if m.host is not msgspec.UNSET):
            break
        limit = size
    if limit is None:
        return f"the host is the limit of F and B, up to micro-batches of {max(profile.microbatch_sizes)}"
    if limit == min(profile.microbatch_sizes):
        return "the device is the limit of F and B, not the host, at all micro-batch sizes"
    return f"the device is the limit of F and B from micro-batches of {limit} on; below, the host is"


def shape_table(profile: ModelProfile) -> Table:
    """Returns the bytes that cross a cut after each layer, next to the rails of the tensors that are alive there."""
    size = max(m.microbatch_size for m in profile.measurements)
    rows = layer_diagram.layer_rows(profile)
    max_cut_bytes = max(row.cut_bytes for row in rows)
    table = empty_table(
        f"shape, micro-batches of {size}", "", "layer", "F + B ms>", "a cut here carries MiB>", "", "tensors>"
    )
    for row in rows:
        carried = number(row.cut_bytes / 2**20) if row.num_tensors else ""
        add_row(
            table,
            Text(row.marks, no_wrap=True),
            row.layer.name,
            number(row.forward_backward_ns / 1e6),
            carried,
            Text(layer_diagram.bar(row.cut_bytes, max_cut_bytes), no_wrap=True),
            str(row.num_tensors or ""),
        )
    return table


def render_cluster(cluster: Cluster) -> Iterator[Table | str]:
    """Yields the devices and the links of a cluster."""
    table = empty_table("devices", "device", "host", "kind", "memory MiB>", "speed>", "computes while it transfers")
    for d in cluster.devices:
        overlaps = "yes" if d.overlaps_transfers else "no"
        overlaps += ", and F beside B" if d.side_by_side else ""
        name = d.name if d.num_members == 1 else f"{d.name}, {d.num_members} members"
        add_row(table, name, d.host, d.kind, number(d.memory_bytes / 2**20), f"{d.speed:g}", overlaps)
    yield table
    links = empty_table("links", "link", "GB/s>", "latency µs>")
    named = [(f"{link.source} to {link.target}", link.bytes_per_s, link.latency_ns) for link in cluster.links]
    intra, inter = cluster.intra_host, cluster.inter_host
    has_one_host = len({device.host for device in cluster.devices}) == 1
    named += [
        ("within a host", intra.bytes_per_s, intra.latency_ns),
        (f"between hosts{' (there is one: not measured)' * has_one_host}", inter.bytes_per_s, inter.latency_ns),
    ]
    if (link := cluster.intra_host_sum) is not msgspec.UNSET:
        named.append(("summing within a host", link.bytes_per_s, link.latency_ns))
    for name, bytes_per_s, latency_ns in named:
        add_row(links, name, number(bytes_per_s / 1e9), number(latency_ns / 1e3))
    yield links
    if cluster.assumed_links is not msgspec.UNSET:
        yield f"the links are assumed, not measured: {printable(cluster.assumed_links)}"
    if cluster.probe is not msgspec.UNSET:
        yield (
            f"in both directions at once, a link has {cluster.probe.both_ways:.0%} of its speed; computing takes "
            f"{cluster.probe.compute_slowdown:.0%} longer while a device receives"
        )
        sums = empty_table("all-reduce over all devices", "KB>", "ms>")
        for reduction in cluster.probe.all_reduce:
            add_row(sums, number(reduction.num_bytes / 1e3), number(reduction.ns / 1e6))
        yield sums
