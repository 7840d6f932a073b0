"""How well profiles add up: layers against the whole step, predicted memory against the allocator, time to measure.

    python benchmarks/fidelity.py [vgg16 resnet50 gnmt8 gpt2] [--microbatch-size 1,4] [--json]

For each model and micro-batch size, with one thread on a CPU, or on CUDA where asked for:

- layers / step: what F + B of the layers add up to, relative to F + B of the model without anything watching it; the
  two take turns, and both figures are medians. ± is the widest spread of a layer that takes a two-hundredth or more.
- (I + W) / B: what it costs to run I and W apart.
- stash: what the profile says is kept from F to B, relative to what the allocator has given out after F.
- peak: parameters, gradients, optimizer state, and the most that a layer's workspace and the stash of it and the layers
  before it take, relative to the same state plus the most that the allocator has given out in F and B.
- judge: the same with the whole stash and the largest workspace, which is what plans reckon with: never less.
- time to measure, by micro-batch size and for all of them.
"""  # fmt: skip

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bapipe.cost import stage_cost
from bapipe.machine import prepare_cpu
from bapipe.measure.layers import measure
from bapipe.profile import ModelProfile
from bapipe.sharing import Sharing
from bapipe.zoo import resolve
from bapipe.zoo.factory import build

MODELS: dict[str, tuple[dict[str, object], str]] = {
    "vgg16": ({}, "1,2,4,8,16"),
    "resnet50": ({}, "1,2,4,8,16"),
    "gnmt8": ({"source_length": 12, "target_length": 12}, "1,4"),
    "gpt2": ({"num_layers": 6}, "1,2"),
}
"""Arguments, and micro-batch sizes where none are given."""


def allocated(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that the CPU allocator has given out at the end of `run`, and at most, beyond what it had before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        kept = run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    del kept
    return held, most


def memory(profile: ModelProfile, module: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor], size: int):
    """Bytes: (predicted, allocated) of the stash, and (predicted, what plans reckon with, allocated) of the peak."""
    measured = profile.at(size)
    cost = stage_cost(list(zip(profile.layers, measured, strict=True))[::-1], 1.0, False, (), Sharing())
    *inputs, target = batch
    module.train()
    loss(module(*inputs), target).backward()  # the gradients that a second micro-batch adds to
    stash, _ = allocated(lambda: loss(module(*inputs), target))
    _, most = allocated(lambda: loss(module(*inputs), target).backward())
    parameters = sum(p.nbytes for p in module.parameters())
    state = parameters + sum(p.grad.nbytes for p in module.parameters() if p.grad is not None) + cost.optimizer_bytes
    held = 2 * cost.param_bytes + cost.optimizer_bytes
    stashed = accumulate(m.stash_bytes for m in measured)
    peak = held + max(before + m.workspace_bytes for before, m in zip(stashed, measured, strict=True))
    reckoned = held + cost.stash_bytes + cost.workspace_bytes
    module.zero_grad()
    loaded = sum(x.nbytes for x in batch)  # the batch is in the stash where a layer saves it, and was there before F
    return (cost.stash_bytes, stash + loaded), (peak, reckoned, state + most + loaded)


def fidelity(name: str, sizes: tuple[int, ...], device: str) -> list[dict[str, object]]:
    """One row a micro-batch size."""
    arguments = MODELS[name][0]
    example = build(resolve(name), arguments)
    rows = []
    for size in sizes:
        start = time.monotonic()
        profile = measure(
            example.module, example.inputs, example.target, example.loss, microbatch_sizes=(size,), name=name,
            device=torch.device(device),
        )  # fmt: skip
        took_s = time.monotonic() - start
        layers = profile.measurements[0].layers
        whole = sum(m.forward_ns + m.whole_backward_ns for m in layers)
        wide = [m.spread for m in layers if m.forward_ns + m.whole_backward_ns >= whole / 200]
        row: dict[str, object] = {
            "model": name,
            "size": size,
            "step_ns": whole,
            "layers_over_step": profile.environment["sum_over_whole"][str(size)],
            "spread": max(wide),
            "passes": profile.environment["passes"][str(size)],
            "split_over_whole": sum(m.input_grad_ns + m.weight_grad_ns for m in layers)
            / sum(m.whole_backward_ns for m in layers),
            "measured_in_s": took_s,
        }
        if device == "cpu":
            batch = tuple(x[torch.arange(size) % len(x)].contiguous() for x in (*example.inputs, example.target))
            stash, peak = memory(profile, example.module, batch, example.loss, size)
            row |= {
                "stash_over_allocated": stash[0] / stash[1],
                "peak_over_allocated": peak[0] / peak[2],
                "judge_over_allocated": peak[1] / peak[2],
            }
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--microbatch-size")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    prepare_cpu(1)
    rows = []
    for name in given.models:
        sizes = tuple(int(size) for size in (given.microbatch_size or MODELS[name][1]).split(","))
        rows += fidelity(name, sizes, given.device)
    if given.json:
        print(json.dumps(rows))
        return
    heads = "model", "size", "F + B ms", "layers / step", "± %", "passes", "(I + W) / B", "stash", "peak", "s"
    table = Table(*heads, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(
            str(row["model"]), str(row["size"]), f"{row['step_ns'] / 1e6:,.1f}", f"{row['layers_over_step']:.3f}",
            f"{100 * row['spread']:.1f}", str(row["passes"]), f"{row['split_over_whole']:.2f}",
            *(f"{row[key]:.3f}" if key in row else "" for key in ("stash_over_allocated", "peak_over_allocated")),
            f"{row['measured_in_s']:.0f}",
        )  # fmt: skip
    Console(width=120).print(table)
    for name in given.models:
        took = sum(row["measured_in_s"] for row in rows if row["model"] == name)
        print(f"{name}: {took:.0f} s for {sum(row['model'] == name for row in rows)} micro-batch sizes")


if __name__ == "__main__":
    main()
