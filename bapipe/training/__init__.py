"""Training runs: data, a process per device, evaluation and checkpoints around `bapipe.runtime`, which runs steps.

A run, from `bapipe.run` down:

1. `run` builds the model (`build`) and the data set from their names, `replan` plans again if devices are lost, and
   `train` checks the plan and launches one process per device (`launch`), each of which runs `train_rank`: a
   `bapipe.runtime.pipeline.Pipeline` in a loop. `train_config` holds the user's options, `train_job` what every rank
   gets.
2. `data` yields mini-batches: each rank loads what its stages use.
3. `step_reports` reports on steps, `tensorboard` writes the reports for TensorBoard, and `not_finite` ends a run whose
   loss or parameters are not finite.
4. `evaluate` runs forwards on held-out data, and `checkpoint` writes all state in the background. Ranks compare
   `job_facts` before they train, and return a `train_result`.
"""
