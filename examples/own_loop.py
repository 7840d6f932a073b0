"""A pipeline inside a training loop of your own: torchrun --nproc-per-node 2 examples/own_loop.py

Every process makes the same plan; `bapipe.Pipeline` keeps only the layers of its own stage.
"""

import torch
import torch.distributed as dist
from torch import nn

import bapipe

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 64))
examples = (torch.zeros(1, 64),)

plans: list[bapipe.Plan | None] = [None]
if dist.get_rank() == 0:
    profile = bapipe.profile(model, examples, torch.zeros(1, 64), nn.MSELoss(), microbatch_sizes=(8, 16))
    plans = [bapipe.plan(profile, dist.get_world_size(), minibatch_size=64, num_stages=dist.get_world_size())]
dist.broadcast_object_list(plans)
assert plans[0] is not None

with bapipe.Pipeline(model, plans[0], loss=nn.MSELoss(), inputs=examples) as pipeline:
    for step in range(20):
        batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        loss = pipeline.step(batch, target=batch.roll(1, dims=1))
        if loss is not None and step % 5 == 4:
            print(f"step {step + 1}: loss {loss:.4f}")

dist.destroy_process_group()
