"""Traces an `nn.Module` into a graph of named layers and tensors, and extracts a module from some of its layers.

Begin with `layers`: its `trace` gives a `TracedModel`, the type in `model`, in four steps.

1. `capture`: the operators of the module as one torch.fx graph, by torch.fx (`fx_capture`), by recording what its code
   calls (`recorded_capture`: `record`, then `merge_recordings`), or by torch.export
   (`export_capture`).
2. `aliasing`: makes the order of in-place changes explicit in the graph. `randomness` says which operators are random.
3. `layers`: assigns each operator to a layer, and names the tensors between layers.
4. `sizes`: values that are not tensors, such as batch sizes, as functions of the batch size.

`extract` goes the other way: from some layers to a module that computes them. `stages` cuts all layers into stages, and
`stage_module` makes the module that a stage runs.
"""
