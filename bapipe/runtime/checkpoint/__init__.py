"""Checkpoints of a training run, readable under any plan: the tensors have the names of the original module.

`config` says where and how often; `writer` saves and loads tensors (torch.distributed.checkpoint), each rank its own;
`manifest` describes a checkpoint and verifies its files; `export` writes one as a single safetensors file.
"""
