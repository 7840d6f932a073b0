"""Steps of plans whose stages are all on one device: predicted and measured, as a whole and by action."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import bapipe
from bapipe.formats.codec import read
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.simulator.timeline import Timeline
from bapipe.zoo import resolve
from bapipe.zoo.example import Example
from bapipe.zoo.factory import build
from benchmarks.gpu.layers import profile_path
from benchmarks.gpu.one_device import plan_on_one_device
from benchmarks.gpu.workloads import MODES, TINY, TRAINED, example_of, random_batch

NUM_MICROBATCHES, NUM_STEPS = 4, 6
PLANS = (("1f1b", 1), ("1f1b", 2), ("zb-h1", 2))
"""Schedule and number of stages."""


def predicted_steps(
    folder: Path, name: str, mode: str, *, is_tiny: bool, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yields predicted and measured figures of each plan, from the profile that is in the folder.

    Micro-batches have the second largest size of the profile, so that four of them fit in memory.
    """
    path = profile_path(folder, name, mode)
    if not path.exists():
        yield {"error": f"there is no profile {path.name}, whose sizes have all failed"}
        return
    profile = read(path, ModelProfile)
    size = profile.microbatch_sizes[max(len(profile.microbatch_sizes) - 2, 0)]
    batch = random_batch(name, example_of(name, is_tiny), size * NUM_MICROBATCHES)
    for schedule, num_stages in PLANS:
        plan = plan_on_one_device(
            profile, schedule, num_ranks=num_stages, microbatch_size=size, num_microbatches=NUM_MICROBATCHES
        )
        with torch.device("meta"):  # the pipeline gives its layers values on the device
            example = build(resolve(name), (TINY if is_tiny else TRAINED)[name].arguments)
        row = _step(plan, profile, example, batch, device, mode)
        yield {"model": name, "mode": mode, "size": size, "schedule": schedule, "stages": num_stages} | row


def _step(
    plan: Plan,
    profile: ModelProfile,
    example: Example,
    batch: tuple[torch.Tensor, ...],
    device: torch.device,
    mode: str,
) -> dict[str, Any]:
    predicted = bapipe.simulate(plan, {profile.device.kind: profile})
    autocast = MODES[mode].autocast
    pipeline = bapipe.Pipeline(
        example.module,
        plan,
        loss=example.loss,
        inputs=batch[:-1],
        device=device,
        initialize=example.initialize,
        autocast=getattr(torch, autocast) if autocast else None,
    )
    steps_ns = []
    for _ in range(NUM_STEPS):
        start_ns = time.perf_counter_ns()
        pipeline.step(*batch[:-1], target=batch[-1])
        pipeline.busy_ns()  # waits for the device
        steps_ns.append(time.perf_counter_ns() - start_ns)
    measured, measured_ns = pipeline.timeline(), median(steps_ns[2:])
    return {
        "predicted_ms": predicted.step_ns / 1e6,
        "measured_ms": measured_ns / 1e6,
        "predicted_over_measured": predicted.step_ns / measured_ns,
        "predicted_peak_bytes": predicted.memory[0].total,
        "measured_peak_bytes": pipeline.peak_bytes(),
        "actions": _ratios(_by_action(predicted), _by_action(measured)),
        "updates": _ratios(_updates(predicted), _updates(measured)),
    }


def _by_action(timeline: Timeline) -> dict[str, int]:
    """Returns the time of each phase of each stage, such as 0F, in all micro-batches together."""
    found: dict[str, int] = {}
    for span in timeline.spans:
        key = f"{span.action.stage}{span.action.phase}"
        found[key] = found.get(key, 0) + span.end_ns - span.start_ns
    return found


def _updates(timeline: Timeline) -> dict[str, int]:
    return {str(update.stage): update.end_ns - update.start_ns for update in timeline.updates}


def _ratios(predicted: dict[str, int], measured: dict[str, int]) -> dict[str, float]:
    return {key: predicted[key] / max(measured[key], 1) for key in predicted if key in measured}
