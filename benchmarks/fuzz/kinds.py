"""The kinds of files that bapipe reads, each with intact ones, and what a command does with a file of that kind."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from math import isclose
from pathlib import Path
from typing import Any

from rich.console import Console

import bapipe
from bapipe.cli.options import key_values
from bapipe.explorer.pages import plan_page, profile_page
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import encode, read
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.importers import ImportMetadata, import_file
from bapipe.planner.inputs.clusters import homogeneous_cluster
from bapipe.report import encode_trace, gantt, render_cluster, render_plan, render_profile
from bapipe.report.chrome_trace import read_trace
from bapipe.simulator.simulate import unit_cost_timeline

ROOT = Path(__file__).parents[2]

MAX_DEVICES = 16
"""Clusters of more devices are read and shown, but not planned for: that is measured by `benchmarks.planner.scale`."""

_GRAPH = """\
node1 -- Input0 -- forward_compute_time=9, backward_compute_time=0, activation_size=16.0, parameter_size=0
node2 -- Embedding(5, 2) -- forward_compute_time=1, backward_compute_time=6, activation_size=40.0, parameter_size=80
node3 -- LSTM(4, 2) -- forward_compute_time=3, backward_compute_time=4, activation_size=[40.0; 6.0], parameter_size=32
node4 -- __getitem__(0) -- forward_compute_time=0, backward_compute_time=0, activation_size=40.0, parameter_size=0
node5 -- __getitem__(1) -- forward_compute_time=0, backward_compute_time=0, activation_size=6.0, parameter_size=0
node6 -- ReLU(inplace) -- forward_compute_time=0.5, backward_compute_time=1, activation_size=40.0, parameter_size=0
node7 -- Linear(2, 5) -- forward_compute_time=2, backward_compute_time=1, activation_size=100.0, parameter_size=44
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode3 -- node5
\tnode4 -- node6
\tnode5 -- node7
\tnode6 -- node7
"""
_TABLES = (
    "layer,forward_ms,backward_ms,activation_bytes,parameter_bytes\nconv1,1.5,3.1,802816,9408\nfc,2,4,4000,8192\n",
    'name;f_us;b_us;act_kib;params_mib\n"a;b";1;2;3;0\nc;4.25;5;6;1\nd;0;0;0;0\n',
)
_ARGUMENTS = ("a=[1, 2, {}]", 'b={"x": 1, "y": [true, null]}', "c=text", "d=1e3")
ORIGIN = ImportMetadata(
    model="m",
    source="s",
    kind="cuda",
    device_name="V100",
    memory_bytes=2**34,
    batch_size=4,
    sizes=(1, 2, 4),
    optimizer="adam",
)


class WrongSuccess(AssertionError):
    """A damaged file was read, and is not what it says."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file.

    Attributes:
        use: reads a file as a command does; raises BapipeError if it refuses it, WrongSuccess if it reads something
            that the file does not say.
    """

    name: str
    seeds: tuple[bytes, ...]
    use: Callable[[Path], None]


def kinds() -> tuple[Kind, ...]:
    """Returns every kind whose reader needs no torch."""
    profile = read(ROOT / "profiles" / "v100" / "gnmt8.json", ModelProfile)
    kind = profile.device.kind
    cluster = homogeneous_cluster({kind: profile}, 2)
    plans = [
        bapipe.plan(profile, cluster, minibatch_size=128, schedules=[name], num_stages=2) for name in ("1f1b", "zb-h1")
    ]
    traces = [encode_trace([("predicted", bapipe.simulate(plan, profile))]) for plan in plans]

    def use_profile(path: Path) -> None:
        found = read(path, ModelProfile)
        check_says(path, encode(found))
        check_shown(shown(render_profile(found)), profile_page(found).decode())
        bapipe.plan(found, homogeneous_cluster({found.device.kind: found}, 2), minibatch_size=128, num_stages=2)

    def use_cluster(path: Path) -> None:
        found = read(path, Cluster)
        check_says(path, encode(found))
        check_shown(shown(render_cluster(found)))
        if len(found.devices) <= MAX_DEVICES:
            bapipe.plan(profile, found, minibatch_size=128, num_stages=1)

    def use_plan(path: Path) -> None:
        found = read(path, Plan)
        check_says(path, encode(found), () if found.is_judged else ("prediction", "certificate", "alternatives"))
        check_shown(shown(render_plan(found)))
        timeline = unit_cost_timeline(found)
        check_shown(gantt(timeline, 120), plan_page(found, {}, [("order", timeline)]).decode())
        bapipe.simulate(found, profile)

    def use_trace(path: Path) -> None:
        for title, timeline in read_trace(path):
            check_shown(gantt(timeline, 120), plan_page(plans[0], {}, [(title, timeline)]).decode())
        num_slices = sum(event.get("ph") == "X" for event in json.loads(path.read_bytes())["traceEvents"])
        num_read = sum(len(t.spans) + len(t.transfers) + len(t.syncs) + len(t.updates) for _, t in read_trace(path))
        if num_slices != num_read:
            raise WrongSuccess(f"{num_slices} slices in the file, {num_read} read")

    return (
        Kind(name="profile", seeds=(encode(profile),), use=use_profile),
        Kind(name="cluster", seeds=(encode(cluster),), use=use_cluster),
        Kind(name="plan", seeds=tuple(map(encode, plans)), use=use_plan),
        Kind(name="trace", seeds=tuple(traces), use=use_trace),
        Kind(name="graph", seeds=(_GRAPH.encode(),), use=_use_graph),
        Kind(name="table", seeds=tuple(table.encode() for table in _TABLES), use=_use_table),
        Kind(name="argument", seeds=tuple(text.encode() for text in _ARGUMENTS), use=_use_argument),
    )


def _use_graph(path: Path) -> None:
    found = import_file(path, ORIGIN)
    wanted_ms = sum(
        float(time[1])
        for line in path.read_text().splitlines()
        if not re.match(r"\s*\S+ -- Input", line) and (time := re.search(r" -- forward_compute_time=([0-9.]+), ", line))
    )
    _check_sum(found, wanted_ms * 1e6)


def _use_table(path: Path) -> None:
    found = import_file(path, ORIGIN)
    num_rows = sum(bool(line.strip()) for line in path.read_text().splitlines()) - 1
    if len(found.layers) != num_rows:
        raise WrongSuccess(f"{num_rows} rows in the file, {len(found.layers)} layers read")


def _use_argument(path: Path) -> None:
    text = path.read_bytes().decode(errors="surrogateescape")
    ((_, value),) = key_values([text]).items()
    json.dumps(value).encode()


def _check_sum(profile: ModelProfile, forward_ns: float) -> None:
    read_ns = sum(layer.forward_ns for layer in profile.at(ORIGIN.batch_size))
    if not isclose(read_ns, forward_ns, rel_tol=1e-9, abs_tol=len(profile.layers) * 4):
        raise WrongSuccess(f"{forward_ns} ns in the file, {read_ns} read")


def check_says(path: Path, encoded: bytes, dropped: tuple[str, ...] = ()) -> None:
    """Raises WrongSuccess unless every value of a file is in the encoded value that was read from it."""
    said, got = json.loads(path.read_bytes(), object_pairs_hook=_unique), json.loads(encoded)
    for where, mine, other in _differences({k: v for k, v in said.items() if k not in dropped}, got, "$"):
        raise WrongSuccess(f"{where}: the file says {mine!r:.60}, read was {other!r:.60}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise WrongSuccess("a key occurs twice")
    return found


def _differences(said: Any, got: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(said, dict) and isinstance(got, dict):
        for key, value in said.items():
            if key in got:
                yield from _differences(value, got[key], f"{where}.{key}")
            elif value not in ([], {}):
                yield where, {key: value}, None
    elif isinstance(said, list) and isinstance(got, list) and len(said) == len(got):
        for i, (mine, other) in enumerate(zip(said, got, strict=True)):
            yield from _differences(mine, other, f"{where}[{i}]")
    elif said != got and not (isinstance(got, float) and isinstance(said, int) and float(said) == got):
        yield where, said, got


def shown(parts: Iterator[Any]) -> str:
    """Returns what a terminal would show."""
    console = Console(file=StringIO(), width=120, markup=False, emoji=False, force_terminal=False)
    for part in parts:
        console.print(part, highlight=False)
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def check_shown(*texts: str) -> None:
    """Raises WrongSuccess if a text for a terminal, or a page, has a character that is obeyed and not shown."""
    for text in texts:
        for char in set(text) - {"\n"}:
            if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
                raise WrongSuccess(f"the character {char!r} is shown as it is")
