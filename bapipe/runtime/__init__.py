"""Runs a plan on torch.distributed: in each process the stages that the plan gives it, step by step.

From `bapipe.Pipeline` down:

1. `pipeline.Pipeline` cuts the traced model as the plan says (`cut_model`, `split`), compares the stages with it
   (`stage_check`), and gives its own layers real storage and initial values that do not depend on the cuts
   (`materialize`). `process_layout` says which process runs which rank of the schedule, `process_groups` makes the
   groups in which gradients are summed. `stage_state` lists parameters and buffers by their names in the model.
2. A step, `Pipeline.step`: an `executor` (one for each size of the inputs, made by `stage_executors`) runs the schedule
   that `lowering` has completed with sends and receives (`transfers`): F, B, I and W in order, a backward whole where
   torch cannot split it (`whole_backward`), a stage's forward or some of its layers once more if the plan recomputes
   them (`recompute`, `recompute_layers`), in a narrower type under `autocast`, with random numbers that do not depend
   on the cuts (`rng`). Micro-batches count by their targets (`loss_weights`).
3. During the last backward of a stage `replicas` sums the gradients of replicas; after the step `tied_weights` sums
   those of weights that several stages use, and `replica_state` makes what the forwards of replicas change equal.
   `grad_scaler` (float16) and clipping look at the gradients of all ranks; `optimizer` then updates stage by stage.
4. After the step `gather_timeline` collects when everything ran (`clock`), and `peak_memory` how much memory it took.
   `evaluation` runs forwards alone, on held-out data.

The loss and the gradients are those of the unsplit model in one process, whatever the plan. Private names of torch are
in `bapipe.torch_private` alone.
"""
