"""A profile's layers and tensors as a graph of networkx."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

    from bapipe.formats.profile import ModelProfile


def to_networkx(profile: "ModelProfile") -> "nx.MultiDiGraph[str]":
    """Returns a profile as a graph of networkx: layers as nodes, tensors as edges from the layer that makes them.

    A node has the attributes of `LayerProfile`, and under `measurements` its `LayerMeasurement` by micro-batch size. An
    edge has the tensor's name as key, and under `num_bytes` its bytes by micro-batch size. Model inputs, which no layer
    makes, are not edges; a node's `inputs` names them.
    """
    import networkx as nx

    measurements = {m.microbatch_size: m.layers for m in profile.measurements}
    graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(model=profile.model, device=profile.device.kind)
    maker: dict[str, str] = {}
    num_bytes: dict[str, dict[int, int]] = {}
    for i, layer in enumerate(profile.layers):
        attributes: dict[str, Any] = {name: getattr(layer, name) for name in layer.__struct_fields__ if name != "name"}
        graph.add_node(layer.name, **attributes, measurements={size: of[i] for size, of in measurements.items()})
        for tensor in dict.fromkeys(layer.inputs):
            if tensor in maker:
                graph.add_edge(maker[tensor], layer.name, key=tensor, num_bytes=num_bytes[tensor])
        for place, tensor in enumerate(layer.outputs):
            maker[tensor] = layer.name
            num_bytes[tensor] = {size: of[i].output_bytes[place] for size, of in measurements.items()}
    return graph
