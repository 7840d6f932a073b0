"""Steps of plans whose stages are all on one device: predicted and measured, as a whole and by action."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec import UNSET
from msgspec.structs import replace

import bapipe
from bapipe.formats.codec import read
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.simulator.timeline import Timeline
from bapipe.torch_settings import autocast_dtype
from bapipe.zoo import resolve
from bapipe.zoo.example import Example
from bapipe.zoo.factory import build
from benchmarks.gpu.layers import profile_path
from benchmarks.gpu.one_device import plan_on_one_device
from benchmarks.gpu.workloads import MODES, TINY, TRAINED, example_of, random_batch

NUM_MICROBATCHES = 4
NUM_ROUNDS, STEPS_PER_ROUND = 4, 3
"""Steps of a round follow each other without waiting for the device, as in training; the first round does not count."""

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
    if device.type == "cuda":  # as batches are that training loads
        batch = tuple(tensor.pin_memory() for tensor in batch)
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
    on_device = bapipe.simulate(plan, {profile.device.kind: _without_host(profile)})
    pipeline = bapipe.Pipeline(
        example.module,
        plan,
        loss=example.loss,
        inputs=batch[:-1],
        device=device,
        initialize=example.initialize,
        autocast=autocast_dtype(MODES[mode]),
    )
    steps_ns = []
    for _ in range(NUM_ROUNDS):
        start_ns = time.perf_counter_ns()
        for _ in range(STEPS_PER_ROUND):
            pipeline.start_step(*batch[:-1], target=batch[-1])
        pipeline.busy_ns()  # waits for the device
        steps_ns.append((time.perf_counter_ns() - start_ns) / STEPS_PER_ROUND)
    measured, measured_ns = pipeline.timeline(), median(steps_ns[1:])
    return {
        "predicted_ms": predicted.step_ns / 1e6,
        "device_alone_ms": on_device.step_ns / 1e6,
        "measured_ms": measured_ns / 1e6,
        "predicted_over_measured": predicted.step_ns / measured_ns,
        "predicted_peak_bytes": predicted.memory[0].total,
        "measured_peak_bytes": pipeline.peak_bytes(),
        "actions": _ratios(_by_action(predicted), _by_action(measured)),
        "updates": _ratios(_updates(predicted), _updates(measured)),
    }


def _without_host(profile: ModelProfile) -> ModelProfile:
    """Returns a profile as if the host took no time to enqueue work.

    Where stages share a device they share its host, too: it enqueues one while the device computes another, but is
    predicted as if each had its own.
    """
    measurements = tuple(
        replace(measured, layers=tuple(replace(layer, host=UNSET) for layer in measured.layers))
        for measured in profile.measurements
    )
    return replace(profile, measurements=measurements)


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
