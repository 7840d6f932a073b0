"""Torch's own DistributedDataParallel on a plan's model and batches: one rank of it, as `__main__` starts it.

python -m benchmarks.two_hosts.ddp PLAN STEPS
"""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bapipe
from bapipe.zoo.factory import build


def main(path: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = bapipe.read(path, bapipe.Plan)
    assert plan.factory is not None
    example = build(plan.factory, plan.arguments)
    model = DistributedDataParallel(example.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=example.learning_rate, momentum=0.9)
    own = plan.num_microbatches // dist.get_world_size()
    x = torch.randn(plan.microbatch_size, *example.tensors[0].shape[1:])
    y = example.target.expand(plan.microbatch_size, *example.target.shape[1:])
    times_ns = []
    for _ in range(steps):
        dist.barrier()
        start_ns = time.perf_counter_ns()
        optimizer.zero_grad(set_to_none=True)
        for m in range(own):
            with model.no_sync() if m + 1 < own else nullcontext():
                (example.loss(model(x), y) / own).backward()
        optimizer.step()
        slowest = torch.tensor([time.perf_counter_ns() - start_ns])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times_ns.append(int(slowest))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(times_ns) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
