"""A job: ranks on one or several hosts that find each other, prove that they belong together, and are the same.

`secret` is what the processes of a job know and others do not; `messages` are frames that only they can send; `server`
and `store` are the store in which ranks meet; `rendezvous` opens it from the environment of torchrun or Slurm, and
`peers` proves the connections between ranks, `groups` makes process groups of them over one of the host's `interfaces`.
"""
