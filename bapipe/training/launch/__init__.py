"""The processes of a run.

`processes.launch` runs a worker in one process per rank and reports why a run failed; `worker` is what each process
does, also to join a job of torchrun (`bapipe.job`); `waiting` limits how long a rank waits for another one.
"""
