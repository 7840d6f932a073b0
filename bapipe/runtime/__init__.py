"""Training a plan on torch.distributed: one process per device, each with the stages that the plan gives it.

A run, from `bapipe.run` down:

1. `run` builds the model and the data set from their names, `replan` plans again if devices are lost, and
   `train` checks the plan and launches one process per device (`launch`), each of which runs `train_rank`.
2. In every process `pipeline.Pipeline` cuts the traced model as the plan says (`split`) and gives its own layers real
   storage and initial values that do not depend on the cuts (`materialize`). `process_layout` says which process runs
   which rank of the schedule, `process_groups` makes the groups in which gradients are summed.
3. `data` yields mini-batches: each rank loads what its stages use.
4. A step, `Pipeline.step`: an `executor` (one for each size of the inputs, made by `stage_executors`) runs the schedule
   that `lowering` has completed with sends and receives: F, B, I and W in order, a stage's forward once more if
   the plan recomputes it (`recompute`), in a narrower type under `autocast`, with random numbers that do not depend on
   the cuts (`rng`).
5. During the last backward of a stage `replicas` sums the gradients of replicas; after the step `tied_weights` sums
   those of weights that several stages use. `grad_scaler` (float16) and clipping look at the gradients of all ranks;
   `optimizer` then updates stage by stage. `stage_state` lists parameters and buffers by their names in the model.
6. After the step `gather_timeline` collects when everything ran (`clock`), `peak_memory` how much memory it took, and
   `checkpoint` writes all state in the background; `evaluate` runs forwards on held-out data.

The loss and the gradients are those of the unsplit model in one process, whatever the plan. Private names of torch are
in `bapipe.torch_private` alone.
"""
