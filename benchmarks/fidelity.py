"""How well profiles add up: layers against the whole step, predicted memory against the allocator, time to measure.

    python -m benchmarks.fidelity [vgg16 resnet50 gnmt8 gpt2] [--microbatch-size 1,4] [--device cuda] [--json]
    python -m benchmarks.fidelity hf

`hf` stands for six models of transformers, small but with layers of several milliseconds.

For each model and micro-batch size, with one thread on a CPU, or on CUDA if asked for:

- layers / step: what F + B of the layers add up to, relative to F + B of the model without instrumentation; the
  two are measured alternately, and both figures are medians.
- ± and max: half the width of the 95 % confidence interval of a layer's median, relative to it: the mean over layers,
  weighted by their time, and the maximum among those that take 0.5 % or more.
- (I + W) / B: the cost of running I and W separately.
- stash: the predicted bytes from F to B, relative to the bytes that the allocator has given out after F.
- peak: parameters, gradients, optimizer state, and the maximum of a layer's workspace plus the stash of it and those
  before it, relative to the same state plus the maximum that the allocator has given out in F and B.
- planned: the same with the whole stash and the largest workspace, as plans assume: never less.
- time to measure all sizes, tracing and memory included.
"""  # fmt: skip

import json
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bapipe.formats.profile import ModelProfile
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.simulator.stage_cost import stage_cost_by_speed
from bapipe.simulator.tied_weights import TiedWeightCost
from bapipe.torch_device import prepare_cpu
from bapipe.torch_private.measuring import memory_events
from bapipe.tracing.bound_inputs import only_tensor_inputs
from bapipe.zoo import resolve
from bapipe.zoo.example import Example
from bapipe.zoo.factory import build
from benchmarks import parser_of

MODELS: dict[str, tuple[dict[str, object], str]] = {
    "vgg16": ({}, "1,2,4,8,16"),
    "resnet50": ({}, "1,2,4,8,16"),
    "gnmt8": ({"source_length": 12, "target_length": 12}, "1,4"),
    "gpt2": ({"num_layers": 6}, "1,4"),
    "hf:LlamaForCausalLM": (
        {
            "num_hidden_layers": 4,
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_attention_heads": 6,
            "vocab_size": 4096,
        },
        "4",
    ),
    "hf:BertForMaskedLM": (
        {"num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6},
        "4",
    ),
    "hf:ViTForImageClassification": (
        {"num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6},
        "4",
    ),
    "hf:GPT2LMHeadModel": ({"n_layer": 4, "n_embd": 384, "n_head": 6, "vocab_size": 4096}, "4"),
    "hf:T5ForConditionalGeneration": ({"num_layers": 3, "d_model": 384, "d_ff": 1024, "vocab_size": 4096}, "4"),
    "hf:ConvNextForImageClassification": ({"depths": [1, 1, 3, 1]}, "4"),
}
"""Arguments, and micro-batch sizes if none are given."""


def allocated(run: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Bytes that the allocator has given out at the end of `run`, and at its peak, beyond those before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = run()
        allocated_bytes, peak_bytes = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        del kept
        return allocated_bytes - before, peak_bytes - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    totals = [0, *accumulate(num_bytes for _, num_bytes in memory_events(profiler))]
    del kept
    return totals[-1], max(totals)


def memory(
    profile: ModelProfile, module: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor], size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes: (predicted, allocated) of the stash, and (predicted, assumed by plans, allocated) of the peak."""
    measured = profile.at(size)
    rows = list(zip(profile.layers, measured, strict=True))[::-1]
    cost = stage_cost_by_speed(rows, frozenset(), (), TiedWeightCost(), sends_gradient=False)(1.0)
    *inputs, target = batch
    module.train()
    loss(module(*inputs), target).backward()  # the gradients that a second micro-batch adds to
    stash, _ = allocated(lambda: loss(module(*inputs), target), target.device)
    _, peak_bytes = allocated(lambda: loss(module(*inputs), target).backward(), target.device)
    held = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    state = held + sum(p.grad.nbytes for p in module.parameters() if p.grad is not None) + cost.optimizer_bytes
    fixed = cost.param_bytes + cost.gradient_bytes + cost.optimizer_bytes
    stashed = accumulate(m.stash_bytes for m in measured)
    peak = fixed + max(before + m.workspace_bytes for before, m in zip(stashed, measured, strict=True))
    assumed = fixed + cost.stash_bytes + cost.workspace_bytes
    module.zero_grad()
    loaded = sum(x.nbytes for x in batch)  # the batch is in the stash if a layer saves it, and was there before F
    return (cost.stash_bytes, stash + loaded), (peak, assumed, state + peak_bytes + loaded)


def fidelity(name: str, sizes: tuple[int, ...], device: torch.device) -> list[dict[str, Any]]:
    """One row per micro-batch size."""
    example = build(resolve(name), MODELS[name][0])
    start = time.monotonic()
    profile = measure_model(
        example.module, example.inputs, example.target, example.loss, ProfileOptions(microbatch_sizes=sizes), name=name,
        device=device, progress=lambda done, total, what: print(f"{name}: {done} of {total}: {what}", file=sys.stderr),
    )  # fmt: skip
    took_s = time.monotonic() - start
    return [figures(example, profile, size, device) | {"measured_in_s": took_s} for size in sizes]


def figures(example: Example, profile: ModelProfile, size: int, device: torch.device) -> dict[str, Any]:
    layers = profile.at(size)
    whole = sum(m.forward_backward_ns for m in layers)
    shares = [m.forward_backward_ns / whole for m in layers]
    batch = tuple(
        x[torch.arange(size) % len(x)].contiguous().to(device) for x in (*example.tensors, example.target)
    )  # fmt: skip
    with only_tensor_inputs(example.module, example.inputs):
        stash, peak = memory(profile, example.module, batch, example.loss, size)
    return {
        "model": profile.model,
        "size": size,
        "step_ns": whole,
        "layers_over_step": profile.environment["sum_over_whole"][str(size)],
        "mean_spread": sum(share * (m.spread or 0.0) for share, m in zip(shares, layers, strict=True)),
        "most_spread": max((m.spread or 0.0) for share, m in zip(shares, layers, strict=True) if share >= 0.005),
        "passes": profile.environment["passes"][str(size)],
        "layers": len(layers),
        "kinds": profile.environment["kinds_of_layers"][str(size)],
        "split_over_whole": sum(m.input_grad_ns + m.weight_grad_ns for m in layers)
        / sum(m.whole_backward_ns for m in layers),
        "stash_over_allocated": stash[0] / stash[1],
        "peak_over_allocated": peak[0] / peak[2],
        "judge_over_allocated": peak[1] / peak[2],
    }


def _models(name: str) -> list[str]:
    return [model for model in MODELS if model.startswith("hf:")] if name == "hf" else [name]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--microbatch-size")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.models = [name for one in given.models for name in _models(one)]
    prepare_cpu(1)
    rows = []
    for name in given.models:
        sizes = tuple(int(size) for size in (given.microbatch_size or MODELS[name][1]).split(","))
        rows += fidelity(name, sizes, torch.device(given.device))
    if given.json:
        print(json.dumps(rows))
        return
    heads = (
        "model",
        "size",
        "F + B ms",
        "layers / step",
        "± %",
        "max %",
        "passes",
        "(I + W) / B",
        "stash",
        "peak",
        "planned",
    )
    table = Table(*heads, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(
            str(row["model"]), str(row["size"]), f"{row['step_ns'] / 1e6:,.1f}", f"{row['layers_over_step']:.3f}",
            f"{100 * row['mean_spread']:.1f}", f"{100 * row['most_spread']:.1f}", str(row["passes"]),
            f"{row['split_over_whole']:.2f}",
            *(f"{row[f'{key}_over_allocated']:.3f}" for key in ("stash", "peak", "judge")),
        )  # fmt: skip
    Console(width=120).print(table)
    for name in given.models:
        rows_of_model = [row for row in rows if row["model"] == name]
        first, num_sizes = rows_of_model[0], len(rows_of_model)
        print(
            f"{name}: {first['measured_in_s']:.0f} s for {num_sizes} micro-batch sizes, {first['layers']} layers of "
            f"{first['kinds']} kinds"
        )


if __name__ == "__main__":
    main()
