"""What a reader of a plan should know besides its figures."""

from functools import cache
from typing import Any

import msgspec

import bapipe
from bapipe.formats.cluster import Cluster
from bapipe.formats.host_times import HostTimes
from bapipe.formats.plan import Plan
from bapipe.formats.profile import HALVED, ModelProfile
from bapipe.planner.analysis.near_ties import near_ties
from bapipe.planner.inputs.options import RUNNABLE, PlanOptions
from bapipe.report.remarks import plan_remarks, scaled_words
from tests.builders import chain, devices


@cache
def profile() -> ModelProfile:
    """Two equal layers that keep much for each micro-batch in flight."""
    return chain([10, 10], stash_bytes=10**6, output_bytes=100)


@cache
def gpipe() -> Plan:
    return bapipe.make(profile(), devices(2), cuts=["l1"], schedule="gpipe", minibatch_size=16, microbatch_size=1)


def options(*schedules: str, **limits: Any) -> PlanOptions:
    return PlanOptions(minibatch_size=16, schedules=schedules, **limits)


def words(plan: Plan, of: ModelProfile, schedules: tuple[str, ...]) -> list[str]:
    return list(plan_remarks(plan, {"a": of}, schedules, near_ties(plan, of, options(*schedules))))


def test_a_plan_at_whose_size_the_host_was_the_limit_says_so() -> None:
    def told(ratio: object) -> list[str]:
        of = msgspec.structs.replace(profile(), environment={"host_over_device": {"1": ratio}})
        return [text for text in plan_remarks(gpipe(), {"a": of}, RUNNABLE, ()) if "host" in text]

    assert told(1.04) == told(None) == []
    (text,) = told(1.4)
    assert text.startswith("at micro-batches of 1 the host took 1.40 times as long to launch the work on")


def test_a_plan_says_in_which_stages_the_host_is_the_limit() -> None:
    """Two layers of F 10 ms; the host takes 12 + 12 ms for the first one."""

    def told(first_ms: int, speed: float = 1.0) -> list[str]:
        host = HostTimes(forward_ns=12 * 10**6, input_grad_ns=0, weight_grad_ns=0, backward_ns=first_ms * 10**6)
        measured = profile().measurements[0]
        layers = (msgspec.structs.replace(measured.layers[0], host=host), *measured.layers[1:])
        measured = msgspec.structs.replace(measured, layers=layers)
        of = msgspec.structs.replace(profile(), measurements=(measured,), environment={"host_over_device": {"1": 3.0}})
        fast = tuple(msgspec.structs.replace(device, speed=speed) for device in gpipe().cluster.devices)
        plan = msgspec.structs.replace(gpipe(), cluster=msgspec.structs.replace(gpipe().cluster, devices=fast))
        return [text for text in plan_remarks(plan, {"a": of}, RUNNABLE, ()) if "host" in text]

    assert told(0) == []
    (text,) = told(9, speed=2.0)
    assert "up to 1.40 times as long" in text
    (text,) = told(48)
    assert text.startswith("at micro-batches of 1 the host takes longer to launch F and B than ")
    assert "in 1 of 2 stages, up to 2.00 times as long: the prediction counts it" in text


def test_a_schedule_that_needs_less_memory_is_a_near_tie() -> None:
    other = bapipe.edit(gpipe(), profile(), schedule="1f1b")
    (tie,) = near_ties(gpipe(), profile(), options("1f1b", "gpipe", "zb-v", "search"))
    assert (tie.name, tie.step_ns) == ("1f1b", other.prediction.step_ns)
    assert tie.peak_bytes == max(rank.peak_bytes for rank in other.prediction.ranks)
    assert tie.peak_bytes < 0.2 * max(rank.peak_bytes for rank in gpipe().prediction.ranks)
    assert near_ties(other, profile(), options("1f1b", "gpipe")) == ()
    assert near_ties(gpipe(), profile(), options("1f1b", memory_limit_bytes=tie.peak_bytes)) == (tie,)
    assert near_ties(gpipe(), profile(), options("1f1b", memory_limit_bytes=tie.peak_bytes - 1)) == ()
    assert words(gpipe(), profile(), ("1f1b",))[0] == (
        "a near-tie: schedule 1f1b with the same stages is as fast and needs at most 1.91 MiB a device, not 15.3 MiB"
    )


def test_one_device_that_is_hardly_slower_is_a_near_tie() -> None:
    def made(cluster: Cluster) -> Plan:
        return bapipe.plan(chain([500, 1], output_bytes=1), cluster, minibatch_size=1, schedules="1f1b")

    slow_link = made(devices(2, latency_ns=1))
    hardly = msgspec.structs.replace(
        bapipe.edit(slow_link, chain([500, 1], output_bytes=1), cuts=["l1"]), alternatives=slow_link.alternatives
    )
    assert len(hardly.stages) == 2
    (tie,) = near_ties(hardly, chain([500, 1], output_bytes=1), options("1f1b"))
    assert (tie.name, tie.is_schedule) == ("one-device", False)
    (alone,) = (other for other in hardly.alternatives if other.name == "one-device")

    def told(step_ns: int) -> list[str]:
        others = (msgspec.structs.replace(alone, step_ns=step_ns),)
        return words(msgspec.structs.replace(hardly, alternatives=others), chain([500, 1], output_bytes=1), ("1f1b",))

    step_ns = hardly.prediction.step_ns
    assert told(round(0.99 * step_ns))[0] == "a near-tie: one-device is 1.0% faster and needs 1 device, not 2"
    assert told(round(1.01 * step_ns))[0] == "a near-tie: one-device is 1.0% slower and needs 1 device, not 2"
    for far in (0.7, 1.3):
        assert not any("near-tie" in text for text in told(round(far * step_ns)))


def test_sizes_that_follow_from_another_are_named() -> None:
    scaled = msgspec.structs.replace(
        profile(),
        measurements=tuple(
            msgspec.structs.replace(profile().measurements[0], microbatch_size=size) for size in (1, 2, 8)
        ),
        environment={"scaled_in_proportion": [1, 2]},
    )
    assert "micro-batches of 1 were not measured on none: their times are in proportion to those of 8" in " ".join(
        words(gpipe(), scaled, ("gpipe",))
    )
    measured = msgspec.structs.replace(gpipe(), minibatch_size=128, microbatch_size=8)
    assert not any("not measured" in text for text in plan_remarks(measured, {"a": scaled}, ("gpipe",), ()))
    others = [msgspec.structs.replace(gpipe(), minibatch_size=16 * size, microbatch_size=size) for size in (2, 8, 1, 2)]
    (text,) = scaled_words(others, {"a": scaled, "b": scaled})
    assert text.startswith("micro-batches of 1, 2 were not measured on none: their times are in proportion to those of")


def test_schedules_that_were_not_searched_are_named() -> None:
    (text,) = plan_remarks(gpipe(), {"a": profile()}, ("1f1b", "gpipe"), ())
    assert text.startswith("not searched: 1f1b+1, ")
    assert "gpipe-2bp" in text
    assert "fbp-as" not in text


def test_a_number_of_stages_that_leaves_devices_unused_is_told_with_the_schedule() -> None:
    plan = bapipe.plan(chain([1, 1, 1, 1]), devices(2), minibatch_size=4, schedules="zb-v", num_stages=2)
    told = [text for text in plan_remarks(plan, {}, RUNNABLE, (), num_stages=2) if "zb-v" in text]
    assert told == ["zb-v runs 2 stages on each device, so 2 stages use 1 device of 2: `num_stages` 4 uses all of them"]
    whole = bapipe.plan(chain([1, 1, 1, 1]), devices(2), minibatch_size=4, schedules="zb-v", num_stages=4)
    assert not [text for text in plan_remarks(whole, {}, RUNNABLE, (), num_stages=4) if "zb-v" in text]


def test_plans_that_run_i_and_w_apart_say_that_these_are_halves_of_a_backward() -> None:
    halved = msgspec.structs.replace(profile(), environment={HALVED: "halves of the measured backward"})

    def told(of: ModelProfile, schedule: str) -> list[str]:
        plan = bapipe.plan(of, devices(2), options(schedule))
        return [text for text in plan_remarks(plan, {"a": of}, RUNNABLE, ()) if "I and W" in text]

    assert told(halved, "gpipe") == told(profile(), "zb-h1") == []
    (text,) = told(halved, "zb-h1")
    assert text.startswith(
        f"I and W of the profile on {halved.device.name} are halves of a backward that was measured whole"
    )
    assert "what zb-h1 would gain is not known" in text
