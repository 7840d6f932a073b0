"""Parses PipeDream's graph.txt (Narayanan et al. 2019, arXiv:1806.03377): a line per node, then indented edges.

    node2 -- Linear(...) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=4.0, parameter_size=8.0
        node1 -- node2

Times are milliseconds, sizes bytes, of the whole batch. The format has these peculiarities:

- The time of an Input node is data loading; here it is an input of the model, without time.
- `__getitem__` selects one tensor of the node before it. It belongs to that node, with its times and parameters: a cut
  between them would send all of its tensors.
- The backward of some LSTMs is timed together with another node: the first, bidirectional LSTM with the embedding
  before it, the last LSTM with the classifier after it. Each pair is one layer here.
- A graph that PipeDream has partitioned says behind each node which stage it is in, which is left out here.
- In-place operators and views keep the storage of the node before them, so they add nothing to the stash.

Sizes are those of the file, even if they are wrong: for GNMT's attention the file confuses items of a nested tuple with
items of the outer one, and gives a concatenation the size of its first operand.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bapipe.errors import BapipeError
from bapipe.importers.figures import figure
from bapipe.importers.to_profile import ImportedLayer

MAX_NESTING = 64
"""Deepest chain of `__getitem__` that is read."""

_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<kind>.*) -- forward_compute_time=(?P<forward>[0-9.]+), "
    r"backward_compute_time=(?P<backward>[0-9.]+), activation_size=(?P<sizes>\[[0-9.; ]*\]|[0-9.]+), "
    r"parameter_size=(?P<params>[0-9.]+)(?: -- stage_id=[0-9]+)?"
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
    def stash_bytes(self) -> int:
        shares_storage = "inplace" in self.kind or self.short_kind in ("View", "Size")
        return 0 if shares_storage else sum(self.sizes)


def is_pipedream(text: str) -> bool:
    """Returns whether the text of a file looks like PipeDream's format."""
    return any(" -- " in line for line in text.splitlines()[:5])


def parse_pipedream(text: str) -> tuple[ImportedLayer, ...]:
    """Returns the layers of a graph.txt in the order of their numbers, which follows the edges.

    A layer of several nodes has their names, joined by `+`.

    Raises:
        BapipeError: a line is neither a node nor an edge, an edge has an unknown node or leads backwards, or an item is
            of no node.
    """
    nodes, sources = _parse(text)
    first_node = _layer_of_node(nodes, sources)
    tensor_of = {node.name: _tensor_name(node, nodes, sources) for node in nodes.values()}
    groups: dict[str, list[_Node]] = {}
    for node in nodes.values():
        if not nodes[first_node[node.name]].is_input:
            groups.setdefault(first_node[node.name], []).append(node)
    users: dict[str, list[str]] = {name: [] for name in nodes}
    for name, feeding in sources.items():
        for source in dict.fromkeys(feeding):
            users[source].append(name)
    return tuple(_layer(group, sources, users, tensor_of) for group in groups.values())


def _parse(text: str) -> tuple[dict[str, _Node], dict[str, list[str]]]:
    """Returns nodes by name in topological order, and the names of the nodes that feed each."""
    parsed: dict[str, _Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if edge := _EDGE.fullmatch(line):
            edges.append((number, edge["source"], edge["target"]))
        elif match := _NODE.fullmatch(line.strip()):
            if match["name"] in parsed:
                raise BapipeError(f"line {number}: a second node is named '{match['name']}'")
            parsed[match["name"]] = _node(number, match)
        else:
            raise BapipeError(
                f"line {number} is neither a node nor an edge of PipeDream's graph.txt: '{line.strip()[:80]}'; want "
                "'node1 -- Module -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes, "
                "parameter_size=bytes' or, indented, 'node1 -- node2'"
            )
    nodes = {name: parsed[name] for name in sorted(parsed, key=_number)}
    position = {name: index for index, name in enumerate(nodes)}
    sources: dict[str, list[str]] = {name: [] for name in nodes}
    for number, source, target in edges:
        for name in (source, target):
            if name not in position:
                raise BapipeError(f"line {number} has an edge of '{name}', which is not a node of the file")
        if position[source] >= position[target]:
            raise BapipeError(
                f"line {number} has an edge from '{source}' back to '{target}'; want nodes numbered in their order"
            )
        sources[target].append(source)
    for feeding in sources.values():
        feeding.sort(key=_number)
    return nodes, sources


def _node(line: int, match: re.Match[str]) -> _Node:
    sizes = re.findall(r"[0-9.]+", match["sizes"])
    return _Node(
        name=match["name"],
        kind=match["kind"],
        forward_ns=figure(line, match["forward"], "forward time", 10**6),
        backward_ns=figure(line, match["backward"], "backward time", 10**6),
        sizes=tuple(figure(line, size, "activation size") for size in sizes),
        param_bytes=figure(line, match["params"], "parameter size"),
    )


def _number(name: str) -> tuple[int, str]:
    """Returns what sorts names by the number that all their digits make, however many there are."""
    digits = "".join(re.findall(r"[0-9]+", name)).lstrip("0")
    return len(digits), digits


def _numbers(name: str) -> tuple[tuple[int, str], ...]:
    """Returns what sorts names by each of their numbers."""
    return tuple(_number(digits) for digits in re.findall(r"[0-9]+", name))


def _tensor_name(node: _Node, nodes: Mapping[str, _Node], sources: Mapping[str, Sequence[str]]) -> str:
    """Returns the name of a node's output."""
    items: list[str] = []
    asked = node.name
    for _ in range(MAX_NESTING + 1):
        if node.is_input or not node.is_item:
            return ":".join([node.kind.lower() if node.is_input else node.name, *reversed(items)])
        producer = nodes[sources[node.name][0]]
        items += [re.sub(r"[^0-9]", "", node.kind)] if len(producer.sizes) > 1 else []
        node = producer
    raise BapipeError(f"'{asked}' is an item of an item, more than {MAX_NESTING} deep")


def _layer_of_node(nodes: Mapping[str, _Node], sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the first node of the layer that each node belongs to."""
    first_node = {name: name for name in nodes}
    for name, node in nodes.items():
        feeding = [nodes[source] for source in sources[name]]
        if node.is_item:
            if not feeding:
                raise BapipeError(f"'{name}' is an item of no node: want an edge from the node that it is taken from")
            first_node[name] = first_node[feeding[0].name]
        elif "bidir" in node.kind.lower():
            embeddings = [source for source in feeding if source.short_kind == "Embedding"]
            if embeddings:
                first_node[name] = first_node[embeddings[0].name]
    _join_classifier(nodes, first_node)
    return first_node


def _join_classifier(nodes: Mapping[str, _Node], first_node: dict[str, str]) -> None:
    """Joins the last LSTM and all nodes after it, if one of these has parameters."""
    order = list(nodes)
    last = next((n for n in reversed(order) if re.match("LSTM|RecurrentAttention", nodes[n].kind)), None)
    if last is None:
        return
    after = order[order.index(last) + 1 :]
    if any(nodes[name].param_bytes for name in after):
        later = set(after)
        first_node |= {name: first_node[last] for name in after if not nodes[name].is_item or first_node[name] in later}


def _layer(
    group: Sequence[_Node],
    sources: Mapping[str, Sequence[str]],
    users: Mapping[str, Sequence[str]],
    tensor_of: Mapping[str, str],
) -> ImportedLayer:
    inside, computing = {node.name for node in group}, [node for node in group if not node.is_item]
    entering = [source for node in computing for source in sources[node.name] if source not in inside]
    leaving: dict[str, int] = {}
    for node in group:
        if any(user not in inside for user in users[node.name]) or not (node.is_item or users[node.name]):
            leaving[tensor_of[node.name]] = sum(node.sizes)
    outputs = sorted(leaving, key=_numbers)
    return ImportedLayer(
        name="+".join(node.name for node in computing),
        kind="+".join(node.short_kind for node in computing),
        inputs=tuple(dict.fromkeys(tensor_of[source] for source in entering)),
        outputs=tuple(outputs),
        forward_ns=sum(node.forward_ns for node in group),
        backward_ns=sum(node.backward_ns for node in group),
        output_bytes=tuple(leaving[name] for name in outputs),
        stash_bytes=sum(node.stash_bytes for node in computing),
        param_bytes=sum(node.param_bytes for node in group),
        no_gradient=tuple(name for name in outputs if not all(node.has_gradient for node in group)),
    )
