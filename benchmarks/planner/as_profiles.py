"""Third-party workloads as profiles, so that bapipe's simulator can time any plan of them.

PipeDream's files have F and B of each layer, and are read as `bapipe import` reads them. The graphs of dnn-partitioning
say which nodes are a forward's and which a backward's, and how long a transfer takes. Nodes that must share a device
are a layer, together with later ones whose forward shares no tensor with any. Transfers take the file's times at 1 GB/s
(1,000 times as long in LayerGraphs, which give transfers in seconds and compute in milliseconds), and a node's size is
taken as the bytes of its parameters. Graphs of inference have no backward. Piper's file has F + B per sample on one
device, of which a third is taken as F, and the bytes of every transfer.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapipe.formats.files import read_limited
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import DeviceKind, ModelProfile
from bapipe.formats.strict_json import decode_json
from bapipe.graph.layer_graph import topological_order
from bapipe.importers import ImportMetadata, import_file
from benchmarks.planner import piper, placement_workload

NUM_MICROBATCHES = 8
BATCH = {"gnmt": 32, "resnet101": 64}
"""Samples of the pass that PipeDream measured, if that is not 128."""

MEMORY_BYTES = 2**50

Row = tuple[str, list[str], dict[str, float], float, float, Any]
"""Of a layer: name, inputs, bytes of each output, nanoseconds of F and of B, and bytes of parameters."""


def workloads(folder: Path) -> Iterator[tuple[str, ModelProfile, tuple[float, ...]]]:
    """Yields every workload's name, profile, and the links in GB/s that it is planned for."""
    for path in sorted((folder / "pipedream").glob("*/graph.txt")):
        yield f"pipedream/{path.parent.name}", _pipedream(path), (1, 12)
    for path in sorted((folder / "dnn-partitioning").glob("*/*.json")):
        yield f"{path.parent.name}/{path.stem}", dnn_partitioning(path), (1,)
    for path in sorted((folder / "piper").glob("*.json")):
        yield f"piper/{path.stem}", _piper(path), (25,)


def _pipedream(path: Path) -> ModelProfile:
    batch = BATCH.get(path.parent.name, 128)
    origin = ImportMetadata(
        model=path.parent.name,
        source="msr-fiddle/pipedream at 7db6a1c",
        kind="v100",
        device_name="V100",
        memory_bytes=MEMORY_BYTES,
        batch_size=batch,
        sizes=(batch // NUM_MICROBATCHES,),
        optimizer="sgd",
    )
    return import_file(path, origin)


def dnn_partitioning(path: Path) -> ModelProfile:
    workload = placement_workload.read(path)
    content: Any = decode_json(read_limited(path), Any)
    nodes = {node["id"]: node for node in content["nodes"]}
    part = {node: i for i, members in enumerate(workload.nodes) for node in members}
    bytes_per_ms = 1e9 if path.parent.name == "LayerGraphs" else 1e6
    sent: dict[int, float] = {}
    users: dict[int, set[int]] = defaultdict(set)
    for edge in content["edges"]:
        source, target = edge["sourceId"], edge["destId"]
        if part[source] != part[target] and not nodes[target]["isBackwardNode"]:
            sent[source] = edge["cost"] * bytes_per_ms
            users[source].add(part[target])
    rows: list[Row] = []
    for i in topological_order(workload.graph):
        nodes_of_layer = [nodes[node] for node in workload.nodes[i]]
        forward, backward = (
            sum(node["fpgaLatency"] for node in nodes_of_layer if node["isBackwardNode"] == back) * 1e6
            for back in (False, True)
        )
        outputs = {f"t{node}": sent[node] for node in workload.nodes[i] if node in sent}
        inputs = [f"t{source}" for source, into in users.items() if i in into]
        param_bytes = sum(node.get("size", 0) for node in nodes_of_layer)
        if rows and not inputs and not outputs:  # such as an update: it joins the layer before
            name, *tensors, f, b, num_bytes = rows[-1]
            rows[-1] = name, *tensors, f + forward, b + backward, num_bytes + param_bytes
        else:
            rows.append((f"n{i}", inputs, outputs, forward, backward, param_bytes))
    return _profile(path.stem, rows)


def _piper(path: Path) -> ModelProfile:
    content: Any = decode_json(read_limited(path), Any)
    workload = piper.Workload(path)
    rows = []
    for i in topological_order(workload.graph):
        node = content["nodes"][i]
        option = node["TMPCs"]["1"][0]
        edges = [(f"e{k}", edge) for k, edge in enumerate(content["edges"])]
        outputs = {name: edge["communicationCost"] for name, edge in edges if edge["sourceId"] == node["id"]}
        inputs = [name for name, edge in edges if edge["destId"] == node["id"]]
        third = option["timePerSample"] * 1e9 / 3
        rows.append((f"n{node['id']}", inputs, outputs, third, 2 * third, option["parameterSize"]))
    return _profile(path.stem, rows)


def _profile(model: str, rows: list[Row]) -> ModelProfile:
    return ModelProfile(
        model=model,
        device=DeviceKind(kind="v100", name="as in the file", memory_bytes=MEMORY_BYTES),
        dtype="float32",
        optimizer="sgd",
        layers=tuple(
            LayerProfile(
                name=name,
                kind="Nodes",
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                param_bytes=round(num_bytes),
                optimizer_state_bytes=0,
                no_gradient=() if any(row[4] for row in rows) else tuple(outputs),
            )
            for name, inputs, outputs, _, _, num_bytes in rows
        ),
        measurements=(
            Measurement(
                microbatch_size=1,
                layers=tuple(
                    LayerMeasurement(
                        forward_ns=round(forward),
                        input_grad_ns=round(backward) // 2,
                        weight_grad_ns=round(backward) - round(backward) // 2,
                        stash_bytes=0,
                        output_bytes=tuple(map(round, outputs.values())),
                    )
                    for _, _, outputs, forward, backward, _ in rows
                ),
            ),
        ),
    )
