"""Traces an `nn.Module` into a graph of named layers and tensors, and extracts a module from some of its layers.

Begin with `layers`: its `trace` gives a `TracedModel`, the type in `model`, in four steps.

1. `capture`: the operators of the module as one graph of torch.fx, a `Captured` (`captured`). Which calls of
   modules are layers, a `layer_choice` says; `leaf_modules` are its patterns. Tried are torch.fx (`fx_capture`),
   recording what the module's code calls (`recorded_capture`), and torch.export (`export_capture`).
   A recording (`recording`) is made at three batch sizes by `record`, and `merge_recordings` makes one graph of them;
   `recorded_functions` writes calls as nodes, `nested_tensors` finds tensors in values, `constant_values` and
   `run_with_values` know values that code branches on. `kept_calls` are kept as they are, `seeding` is noticed, as is
   code that asks of which class a value is (`asked_class`), or calls a layer with other arguments (`layer_arguments`).
   Where all that fails a module is one layer: `reasons` say why and what to change, `code_position` where.
   `sparse_constants` refuses sparse tensors between layers; `control_flow` says what is wrong with `torch.cond`.
2. `aliasing`: makes the order of in-place changes explicit in the graph. `randomness` says which operators are random,
   `shared_memory` refuses parameters that share memory with other tensors.
3. `layers`: assigns each operator to a layer, and names the tensors between layers. `results` says how what the model
   returns is nested, `structure` how that is of a layer.
4. `sizes`: values that are not tensors, such as batch sizes, as functions of the batch size.

`extract` goes the other way: from some layers to a module that computes them. `stages` cuts all layers into stages;
`stage_module` makes the module that a stage runs, `stage_parts` one of which some layers are recomputed.

About traced models: `changing_state` says which layers must share a stage, or have no replicas, for what a forward
changes; `layer_shapes` has their channels, planes and heads (`attention_heads`); `weight_nodes` finds the part of a
backward that W runs. `bound_inputs` makes inputs that are no tensors part of a module before it is traced.
"""
