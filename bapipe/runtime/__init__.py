"""Training a plan on torch.distributed: one process per device, each with the stages that the plan gives it.

A run, from `bapipe.run` down:

1. `run` builds the model (`build`) and the data set from their names, `replan` plans again if devices are lost, and
   `train` checks the plan and launches one process per device (`launch`), each of which runs `train_rank`.
2. In every process `pipeline.Pipeline` cuts the traced model as the plan says (`split`), compares the stages with it
   (`stage_check`), and gives its own layers real storage and initial values that do not depend on the cuts
   (`materialize`). `process_layout` says which process runs which rank of the schedule, `process_groups` makes the
   groups in which gradients are summed.
3. `data` yields mini-batches: each rank loads what its stages use.
4. A step, `Pipeline.step`: an `executor` (one for each size of the inputs, made by `stage_executors`) runs the schedule
   that `lowering` has completed with sends and receives (`transfers`): F, B, I and W in order, a backward whole where
   torch cannot split it (`whole_backward`), a stage's forward or some of its layers once more if the plan recomputes
   them (`recompute`, `recompute_layers`), in a narrower type under `autocast`, with random numbers that do not depend
   on the cuts (`rng`). Micro-batches count by their targets (`loss_weights`).
5. During the last backward of a stage `replicas` sums the gradients of replicas; after the step `tied_weights` sums
   those of weights that several stages use, and `replica_state` makes what the forwards of replicas change equal.
   `grad_scaler` (float16) and clipping look at the gradients of all ranks; `optimizer` then updates stage by stage.
   `stage_state` lists parameters and buffers by their names in the model.
6. After the step `gather_timeline` collects when everything ran (`clock`), `peak_memory` how much memory it took,
   `step_reports` what is reported, and `checkpoint` writes all state in the background; `evaluate` runs forwards on
   held-out data.

The loss and the gradients are those of the unsplit model in one process, whatever the plan. Private names of torch are
in `bapipe.torch_private` alone.
"""
