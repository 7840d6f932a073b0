"""The processes of a run.

`processes.launch` runs a worker in one process per rank and reports why a run failed; `worker` is what happens in each
process, and joins the ranks of a job of torchrun (`bapipe.job`); `waiting` is how long a rank waits for another one.
"""
