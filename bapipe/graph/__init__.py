"""The graph of a model's layers, which decides where the model may be cut.

`layer_graph` has the graph of a profile, its topological orders and contraction, and the same graph for networkx.
`downsets` lists the sets of layers that may lie before a cut. Begin with `layer_graph.of_layers`.
`minimum_cut` is that of networkx, `reached` searches any graph.
"""
