"""PipeDream's graph.txt (Narayanan et al. 2019, arXiv:1806.03377): a line a node, then its indented edges.

    node2 -- Linear(...) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=4.0, parameter_size=8.0
        node1 -- node2

Times are milliseconds, sizes bytes, of the whole batch. What has to be known to read it:

- The time of an Input node is data loading; it is a model input here, and takes none.
- `__getitem__` takes one tensor of the node before it and belongs to that node: apart, a cut would carry both.
- The backward of an LSTM is timed with a neighbour: that of the first, bidirectional one with the embedding before it,
  that of the classifier with the last LSTM before it. Each pair is one layer here.
- In-place operators and views keep the storage of the node before them, so they add nothing to the stash.

Sizes are the file's own, also where it is wrong: for GNMT's attention it takes items of a tuple within a tuple for
items of the outer one, and gives a concatenation the size of its first part.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bapipe.errors import BapipeError
from bapipe.importers.to_profile import ImportedLayer

_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<kind>.*) -- forward_compute_time=(?P<forward>[\d.]+), "
    r"backward_compute_time=(?P<backward>[\d.]+), activation_size=(?P<sizes>\[[\d.; ]*\]|[\d.]+), "
    r"parameter_size=(?P<params>[\d.]+)"
)
_EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<target>\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    kind: str
    forward_ns: int
    backward_ns: int
    sizes: tuple[int, ...]
    param_bytes: int

    @property
    def is_input(self) -> bool:
        return self.kind.startswith("Input")

    @property
    def is_item(self) -> bool:
        return self.kind.startswith("__getitem__")

    @property
    def short_kind(self) -> str:
        return re.split(r"[( ]", self.kind, maxsplit=1)[0]

    @property
    def has_gradient(self) -> bool:
        return self.short_kind != "Size"

    @property
    def kept_bytes(self) -> int:
        shares_storage = "inplace" in self.kind or self.short_kind in ("View", "Size")
        return 0 if shares_storage else sum(self.sizes)


def is_pipedream(text: str) -> bool:
    """Returns whether a file looks like PipeDream's."""
    return any(" -- " in line for line in text.splitlines()[:5])


def pipedream_layers(text: str) -> tuple[ImportedLayer, ...]:
    """Returns the layers of a graph.txt in the order of their numbers, which follows the edges.

    A layer has the name of its node, or of its nodes joined by `+`.

    Raises:
        BapipeError: a line that is no node and no edge, an edge of an unknown node, or one that flows backwards.
    """
    nodes, sources = _parse(text)
    owner = _owners(nodes, sources)
    tensor_of = {node.name: _tensor(node, nodes, sources) for node in nodes.values()}
    groups: dict[str, list[_Node]] = {}
    for node in nodes.values():
        if not node.is_input and not node.is_item:
            groups.setdefault(owner[node.name], []).append(node)
    users = {source: [n for n, own in sources.items() if source in own] for source in nodes}
    return tuple(_layer(group, nodes, sources, users, tensor_of) for group in groups.values())


def _parse(text: str) -> tuple[dict[str, _Node], dict[str, list[str]]]:
    """Returns nodes by name in topological order, and the nodes that feed each."""
    found: dict[str, _Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if edge := _EDGE.fullmatch(line):
            edges.append((number, edge["source"], edge["target"]))
        elif match := _NODE.fullmatch(line.strip()):
            sizes = re.findall(r"[\d.]+", match["sizes"])
            found[match["name"]] = _Node(
                name=match["name"],
                kind=match["kind"],
                forward_ns=round(float(match["forward"]) * 1e6),
                backward_ns=round(float(match["backward"]) * 1e6),
                sizes=tuple(round(float(size)) for size in sizes),
                param_bytes=round(float(match["params"])),
            )
        else:
            raise BapipeError(
                f"line {number} is no node and no edge of PipeDream's graph.txt: '{line.strip()[:80]}'; want "
                "'node1 -- Module -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes, "
                "parameter_size=bytes' or, indented, 'node1 -- node2'"
            )
    nodes = {name: found[name] for name in sorted(found, key=_number)}
    place = {name: index for index, name in enumerate(nodes)}
    sources: dict[str, list[str]] = {name: [] for name in nodes}
    for number, source, target in edges:
        for name in (source, target):
            if name not in place:
                raise BapipeError(f"line {number} has an edge of '{name}', which is no node of the file")
        if place[source] >= place[target]:
            raise BapipeError(
                f"line {number}: an edge from '{source}' back to '{target}'; nodes are in order of number"
            )
        sources[target].append(source)
    for own in sources.values():
        own.sort(key=_number)
    return nodes, sources


def _number(name: str) -> int:
    return int("".join(re.findall(r"\d+", name)) or 0)


def _tensor(node: _Node, nodes: Mapping[str, _Node], sources: Mapping[str, Sequence[str]]) -> str:
    """Returns the name of what a node gives others."""
    if node.is_input:
        return node.kind.lower()
    if not node.is_item or not sources[node.name]:
        return node.name
    producer = nodes[sources[node.name][0]]
    inner = _tensor(producer, nodes, sources)
    return f"{inner}:{re.sub(r'[^0-9]', '', node.kind)}" if len(producer.sizes) > 1 else inner


def _owners(nodes: Mapping[str, _Node], sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the first node of the layer that each node belongs to."""
    owner = {name: name for name in nodes}
    for name, node in nodes.items():
        feeding = [nodes[source] for source in sources[name]]
        if node.is_item and feeding:
            owner[name] = owner[feeding[0].name]
        elif "bidir" in node.kind.lower():
            embeddings = [source for source in feeding if source.short_kind == "Embedding"]
            if embeddings:
                owner[name] = owner[embeddings[0].name]
    _join_classifier(nodes, owner)
    return owner


def _join_classifier(nodes: Mapping[str, _Node], owner: dict[str, str]) -> None:
    """Joins the last LSTM and all after it, where a classifier with parameters ends the model."""
    order = list(nodes)
    last = next((n for n in reversed(order) if re.match("LSTM|RecurrentAttention", nodes[n].kind)), None)
    if last is None:
        return
    after = order[order.index(last) + 1 :]
    if any(nodes[name].param_bytes for name in after):
        owner |= {name: owner[last] for name in after if not nodes[name].is_item or owner[name] in after}


def _layer(
    group: Sequence[_Node],
    nodes: Mapping[str, _Node],
    sources: Mapping[str, Sequence[str]],
    users: Mapping[str, Sequence[str]],
    tensor_of: Mapping[str, str],
) -> ImportedLayer:
    members = {node.name for node in group}
    items = {n for n in nodes if nodes[n].is_item and any(source in members for source in sources[n])}
    inside = members | items
    entering = [source for node in group for source in sources[node.name] if source not in inside]
    leaving: dict[str, int] = {}
    for name in (*members, *items):
        if any(user not in inside for user in users[name]) or (name in members and not users[name]):
            leaving[tensor_of[name]] = sum(nodes[name].sizes)
    outputs = sorted(leaving, key=lambda name: tuple(map(int, re.findall(r"\d+", name))))
    return ImportedLayer(
        name="+".join(node.name for node in group),
        kind="+".join(node.short_kind for node in group),
        inputs=tuple(dict.fromkeys(tensor_of[source] for source in entering)),
        outputs=tuple(outputs),
        forward_ns=sum(node.forward_ns for node in group),
        backward_ns=sum(node.backward_ns for node in group),
        output_bytes=tuple(leaving[name] for name in outputs),
        kept_bytes=sum(node.kept_bytes for node in group),
        param_bytes=sum(node.param_bytes for node in group),
        no_gradient=tuple(name for name in outputs if not all(node.has_gradient for node in group)),
    )
