"""Checkpoints of a training run, readable under any plan: the tensors have the names of the original module.

`writer` saves and loads tensors, each rank its own, in the safetensors files of `tensor_files`; `manifest` describes a
checkpoint and verifies its files; `folder` finds the newest and locks the folder; `export` writes one as a single
safetensors file; `convert` reads those of older versions; `weights` starts a run from such a file.
`state_outside` looks for state that no checkpoint holds.
"""
