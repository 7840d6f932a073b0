"""The processes of a run.

`processes.launch` runs a worker in one process per rank and reports why a run failed; `worker` is what happens in each
process; under torchrun `rendezvous` lets the ranks of the job wait for one another and agree on who reports a failure.
"""
