"""What a reader of a plan should know besides its figures: near-ties, what was not searched, what was not measured."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET

from bapipe.formats.plan import Plan
from bapipe.formats.profile import HALVED, HOST_OVER_DEVICE, ModelProfile, ProfilesByKind, has_host_times
from bapipe.planner.analysis.exchange import device_ns
from bapipe.planner.analysis.near_ties import NearTie
from bapipe.planner.inputs.options import RUNNABLE
from bapipe.printable import counted, printable
from bapipe.report.formatting import mib
from bapipe.schedules import LOOPED
from bapipe.schedules.table import Phase

MAX_HOST_OVER_DEVICE = 1.05
"""Up to this ratio the GPU is the limit."""

SCALED = "scaled_in_proportion"
"""Where a profile's environment lists the micro-batch sizes whose figures follow from those of another size."""


def plan_remarks(
    plan: Plan,
    profiles: ProfilesByKind,
    schedules: Sequence[str],
    ties: Sequence[NearTie],
    num_stages: int | None = None,
) -> Iterator[str]:
    """Yields sentences about a plan that was searched for; arguments that they name are in backticks.

    Args:
        schedules: those that were searched.
        num_stages: if the user fixed it.
    """
    if num_stages is not None:
        yield from _unused_words(plan)
    for tie in ties:
        yield _tie_words(plan, tie)
    yield from scaled_words([plan], profiles)
    yield from [words for profile in profiles.values() if (words := _host_words(plan, profile))][:1]
    yield from halved_words([plan], profiles)
    others = [name for name in RUNNABLE if name not in schedules]
    if others and len(plan.cluster.devices) > 1:
        names = ", ".join(others)
        yield f"not searched: {names}; `schedules` all searches every schedule that torch can run"


def halved_words(plans: Iterable[Plan], profiles: ProfilesByKind) -> Iterator[str]:
    """Yields that plans which run I and W apart rest on profiles that do not have them, if so."""
    halved = [profile for profile in profiles.values() if HALVED in profile.environment]
    apart = [
        plan.schedule for plan in plans if any(a.phase is Phase.INPUT_GRAD for own in plan.table.order for a in own)
    ]
    if halved and apart:
        names = ", ".join(dict.fromkeys(apart))
        yield (
            f"I and W of the profile on {printable(halved[0].device.name)} are halves of a backward that was measured "
            f"whole, and what I leaves in memory for W is taken as nothing: what {names} would gain is not "
            "known (measured apart, I and W of LSTMs took 1.5 to 1.9 times as long as their backward)"
        )


def scaled_words(plans: Sequence[Plan], profiles: ProfilesByKind) -> Iterator[str]:
    """Yields which micro-batch sizes of some plans were not measured, nor lie between two that were, if any.

    That is said of the first profile for which it is so.
    """
    for profile in profiles.values():
        sizes = sorted({plan.microbatch_size for plan in plans if _is_scaled(profile, plan.microbatch_size)})
        measured = [size for size in profile.microbatch_sizes if not _is_scaled(profile, size)]
        if sizes and measured:
            yield (
                f"micro-batches of {', '.join(map(str, sizes))} were not measured on {printable(profile.device.name)}: "
                f"their times are in proportion to those of {measured[-1]}, which small ones seldom reach; "
                f"`microbatch_size` {measured[-1]} plans with measured times"
            )
            return


def _is_scaled(profile: ModelProfile, microbatch_size: int) -> bool:
    """Returns whether a profile's figures at a micro-batch size follow from those of another size."""
    scaled = profile.environment.get(SCALED)
    lower = max((size for size in profile.microbatch_sizes if size <= microbatch_size), default=None)
    return isinstance(scaled, list) and lower in scaled


def _unused_words(plan: Plan) -> Iterator[str]:
    """Yields why the number of stages that was asked for leaves devices unused, if its schedule is the reason."""
    num_used, num_devices = len(plan.used_devices), len(plan.cluster.devices)
    if plan.schedule not in LOOPED or num_used == num_devices:
        return
    on_each = len(plan.stages) // num_used
    devices = counted(num_used, "device")
    yield (
        f"{plan.schedule} runs {on_each} stages on each device, so {len(plan.stages)} stages use {devices} of "
        f"{num_devices}: `num_stages` {on_each * num_devices} uses all of them"
    )


def _host_words(plan: Plan, profile: ModelProfile) -> str:
    """Returns that the host is the limit at the plan's micro-batch size; empty if the GPU is, or neither is known."""
    if has_host_times(profile):
        return _host_bound_stages(plan, profile)
    ratios = profile.environment.get(HOST_OVER_DEVICE)
    ratio = ratios.get(str(plan.microbatch_size)) if isinstance(ratios, dict) else None
    if not isinstance(ratio, float) or ratio <= MAX_HOST_OVER_DEVICE:
        return ""
    return (
        f"at micro-batches of {plan.microbatch_size} the host took {ratio:.2f} times as long to launch the work on "
        f"{printable(profile.device.name)} as that took to do it: a run may be slower than planned; a larger "
        "`microbatch_size` may not"
    )


def _host_bound_stages(plan: Plan, profile: ModelProfile) -> str:
    """Returns which stages wait for the host, which launches F and B more slowly than the GPU does them."""
    measured = dict(zip((layer.name for layer in profile.layers), profile.at(plan.microbatch_size), strict=True))
    speeds = {device.name: device.speed for device in plan.cluster.devices if device.kind == profile.device.kind}
    ratios = {}
    for number, stage in enumerate(plan.stages):
        fastest = max((speeds[name] for name in stage.devices if name in speeds), default=None)
        if fastest is None:
            continue
        layers = [measured[name] for name in stage.layers]
        on_device_ns = device_ns(layers, fastest)
        host_ns = sum(m.host.forward_ns + m.host.backward_ns for m in layers if m.host is not UNSET)
        if host_ns > MAX_HOST_OVER_DEVICE * on_device_ns:
            ratios[number] = host_ns / max(on_device_ns, 1)
    if not ratios:
        return ""
    return (
        f"at micro-batches of {plan.microbatch_size} the host takes longer to launch F and B than "
        f"{printable(profile.device.name)} takes to do them, in {len(ratios)} of {len(plan.stages)} stages, up to "
        f"{max(ratios.values()):.2f} times as long: the prediction counts it; a larger `microbatch_size` may be faster"
    )


def _tie_words(plan: Plan, tie: NearTie) -> str:
    slower = tie.step_ns / max(plan.prediction.step_ns, 1) - 1 if tie.step_ns else 0.0
    what = f"schedule {tie.name} with the same stages" if tie.is_schedule else tie.name
    percent = f"{abs(slower):.1%}"
    pace = "as fast" if percent == "0.0%" else f"{percent} {'slower' if slower > 0 else 'faster'}"
    needs = f"needs at most {mib(tie.peak_bytes)} a device, not {mib(plan.prediction.peak_bytes)}"
    if not tie.is_schedule:
        needs = f"needs 1 device, not {len(plan.used_devices)}"
    return f"a near-tie: {what} is {pace} and {needs}"
