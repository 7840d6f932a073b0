"""Evaluation of a pipeline on held-out data, without changing what is trained.

`forward` runs the stages' forwards in evaluation mode, `evaluate` computes loss, metrics and scores of a data set with
it, and `generate` decodes texts.
"""
