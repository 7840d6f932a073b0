"""Measures: from a module to its profile, and from the devices of this machine or of a job to a cluster.

Begin with `profile`: the public functions, for a module and for a model by name, and the cache on disk. A measurement
takes this path:

1. `measure`: traces the module, and for each micro-batch size prepares it (`prepare`) and times layers and memory; the
   optimizer is timed once (`optimizer_step`). It puts the figures together to a `ModelProfile`.
2. `layer_times` and `layer_memory`: passes of the whole model, in which layers report when they begin (`instrument`);
   `timers` takes the times. `split_backward` splits B into I and W.
3. `isolated`: instead of 2, one layer at a time, for models that do not fit on a device. `layer_calls` runs layers one
   after another, and finds equal layers, which are measured together.

Links: `cluster` makes a cluster of this machine with one measured link (`links`); `probe` measures the links between
all pairs of ranks; both run in processes that `spawn` starts. `co_runners` are processes that train the model while it
is measured.
"""
