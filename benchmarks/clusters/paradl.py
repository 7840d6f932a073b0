"""ParaDL's runs of data parallelism on ABCI, predicted from its layer tables, beside its authors' own projections."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.files import naming_file, read_limited
from bapipe.formats.stage_plan import StagePlan
from bapipe.formats.strict_json import decode_json
from bapipe.importers import ImportMetadata, import_file
from bapipe.simulator.stage_cost import build_stages
from benchmarks.clusters.deepspeed import sum_and_update_ns

KIND = "V100"
NUM_SAMPLES = 1_280_000
"""Samples of ImageNet in ParaDL's tables."""

DEVICES_PER_HOST = 4
WITHIN_HOST = Bandwidth(bytes_per_s=63_690_000_000, latency_ns=500)
BETWEEN_HOSTS = Bandwidth(bytes_per_s=12_500_000_000, latency_ns=500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network of ParaDL: its table, and the samples of one device in a step."""

    name: str
    folder: str
    table: str
    batch_size: int


NETWORKS = (
    Network(name="VGG-16", folder="vgg", table="VGG_ImageNet_profall.net_sc", batch_size=32),
    Network(name="ResNet-50", folder="resnet", table="RESNET50_ImageNet_profall.net_sc", batch_size=64),
    Network(name="AlexNet", folder="alexnet", table="ALEXNET_ImageNet_profall.net_sc", batch_size=512),
)


class _Epoch(msgspec.Struct, frozen=True):
    iteration: int
    elapsed_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Seconds a step of one network on some devices."""

    num_devices: int
    measured_s: float
    predicted_s: float
    projected_s: float

    def accuracy(self, seconds: float) -> float:
        """Returns 1 - the relative error of a prediction, as ParaDL's authors count it."""
        return 1 - abs(seconds / self.measured_s - 1)


def points(network: Network, logs: Path, analysis: Path) -> Iterator[Point]:
    """Yields the points of a network that were measured and projected, by number of devices."""
    projected = projections(analysis / "log" / f"data_{network.folder}_scaling_proj.log", network.batch_size)
    for num_devices, projected_s in sorted(projected.items()):
        measured_s = measured_step_s(logs / "data" / "results" / network.folder / str(num_devices))
        if measured_s is not None:
            predicted_s = predicted_step_s(network, analysis / "model" / network.table, num_devices)
            yield Point(
                num_devices=num_devices, measured_s=measured_s, predicted_s=predicted_s, projected_s=projected_s
            )


def measured_step_s(folder: Path) -> float | None:
    """Returns the seconds of a step in the latest log of several epochs: the median over all but the first.

    None if there is no such log.
    """
    for path in sorted(folder.glob("*.log"), reverse=True):
        with naming_file(path):
            epochs: tuple[_Epoch, ...] = decode_json(read_limited(path), tuple[_Epoch, ...])
        if len(epochs) > 1:
            return median((b.elapsed_time - a.elapsed_time) / (b.iteration - a.iteration) for a, b in pairwise(epochs))
    return None


def projections(path: Path, batch_size: int) -> dict[int, float]:
    """Returns the authors' seconds a step by number of devices: their time of an epoch divided by its steps."""
    steps = {}
    for line in read_limited(path).decode().splitlines():
        cells = line.split()
        if len(cells) == 8 and cells[0] == "data":
            num_devices, epoch_s = round(float(cells[2])), float(cells[6])
            steps[num_devices] = epoch_s / -(-NUM_SAMPLES // (batch_size * num_devices))
    return steps


def predicted_step_s(network: Network, table: Path, num_devices: int) -> float:
    """Returns forward and backward of the device's samples, then the sum of the gradients over all devices."""
    metadata = ImportMetadata(
        model=network.name,
        source=table.name,
        kind=KIND,
        device_name=KIND,
        memory_bytes=0,
        batch_size=network.batch_size,
        sizes=(network.batch_size,),
        optimizer="adam",
    )
    profile = import_file(table, metadata)
    names = tuple(f"gpu{rank}" for rank in range(num_devices))
    cluster = Cluster(
        devices=tuple(
            Device(name=name, host=f"host{rank // DEVICES_PER_HOST}", kind=KIND, memory_bytes=0)
            for rank, name in enumerate(names)
        ),
        intra_host=WITHIN_HOST,
        inter_host=BETWEEN_HOSTS,
    )
    plan = StagePlan(layers=tuple(layer.name for layer in profile.layers), devices=names)
    stage = build_stages([plan], {KIND: profile}, cluster, network.batch_size)[0]
    compute_ns = stage.costs[0].forward_ns + stage.costs[0].backward_ns
    return (compute_ns + sum_and_update_ns(stage, range(num_devices), cluster)) / 1e9


def paradl_table(logs: Path, analysis: Path) -> Table:
    """Returns measured, predicted and projected steps; ours and theirs on average."""
    drawn = Table(title="ParaDL, data parallelism on V100", box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    drawn.add_column("network")
    for title in ("GPUs", "measured ms", "predicted ms", "accuracy", "authors ms", "their accuracy"):
        drawn.add_column(title, justify="right", no_wrap=True)
    everything: list[Point] = []
    for network in NETWORKS:
        found = list(points(network, logs, analysis))
        for point in found:
            drawn.add_row(network.name, str(point.num_devices), *_figures(point))
        if found:
            drawn.add_row(f"{network.name}, mean", "", *_means(found), style="bold")
        everything += found
    if not everything:
        raise BapipeError(f"{logs}: no log of data parallelism with two epochs; want a checkout of ankahira/paraDL")
    drawn.add_row("all, mean", "", *_means(everything), style="bold")
    return drawn


def _figures(point: Point) -> list[str]:
    ours, theirs = (point.accuracy(seconds) for seconds in (point.predicted_s, point.projected_s))
    return [
        f"{1e3 * point.measured_s:.1f}",
        *(f"{1e3 * point.predicted_s:.1f}", f"{ours:.1%}"),
        *(f"{1e3 * point.projected_s:.1f}", f"{theirs:.1%}"),
    ]


def _means(found: list[Point]) -> list[str]:
    ours = sum(point.accuracy(point.predicted_s) for point in found) / len(found)
    theirs = sum(point.accuracy(point.projected_s) for point in found) / len(found)
    return ["", "", f"{ours:.1%}", "", f"{theirs:.1%}"]
