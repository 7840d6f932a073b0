"""Evaluation of a pipeline on held-out data, without changing what is trained.

`evaluate` computes loss, metrics and scores of a data set, and `generate` decodes texts. Both run the stages' forwards
by `bapipe.runtime.evaluation`.
"""
