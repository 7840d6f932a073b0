"""Runs a plan on torch.distributed: each process runs the stages that the plan assigns to its device.

From `bapipe.Pipeline` down:

1. `pipeline.Pipeline` is made of its `rank_stages`: the model is traced, cut into the plan's stages (`cut_model`,
   `split`), these are compared with the model (`stage_check`, of each as a `planned_stage`), and this rank's layers get
   storage and initial values that do not depend on the cuts (`materialize`). `process_layout` says which process runs
   which rank of the schedule; `connected_stages` is what then runs and communicates, in groups that `process_groups`
   makes and destroys. `stage_state` lists parameters and buffers by their names in the model.
2. In each of the `training_steps` an `executor` (one per input size, made by `stage_executors`) runs the schedule's
   actions F, B, I and W, and the sends and receives (`transfers`) that `lowering` has added. A backward that torch
   cannot split into I and W runs whole (`whole_backward`). Stages (`recompute`) or layers (`recompute_layers`) that the
   plan recomputes run their forward again before the backward. `autocast` computes in a 16-bit type, `rng` makes random
   numbers independent of the cuts, and `loss_weights` weights the losses of micro-batches by their targets.
3. During the last backward of a stage `replicas` sums the gradients of replicas. After the step `tied_weights` sums the
   gradients of weights that several stages use, and `replica_state` gives the replicas equal running statistics.
   `update` completes them: `grad_scaler` (float16) and clipping use the gradients of all ranks; `optimizer` then
   updates stage by stage; `optimizer_state` is saved and restored by the names of parameters.
4. After the step `gather_timeline` collects when everything ran (`clock`), and `peak_memory` how much memory it took.
   `evaluation` runs forwards alone, on held-out data.

The loss and the gradients are those of the unsplit model in one process, whatever the plan. Private names of torch are
in `bapipe.torch_private` alone.
"""
