"""When a device is lost, training continues with a plan for the remaining ones, with the same results."""

import socket
from pathlib import Path

import pytest
from msgspec import structs

import bapipe
from bapipe.errors import BapipeError, RunFailed
from bapipe.formats.certificate import MemoryLimit
from bapipe.formats.cluster import Device, Link
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.plan import Plan
from bapipe.formats.profile import DeviceKind, ModelProfile
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan import plan_cached, plan_once
from bapipe.training import replan as replan_module
from bapipe.training.replan import lost_devices, profiles_for_replanning, replan, run_with_replanning
from bapipe.training.train_result import StepReport, TrainResult
from tests.multiprocess.runtime_cases import make_plan, named_order

FACTORY = "tests.multiprocess.replan_model:small"
NAMES = ("0", "1", "2", "3", "4", "5", "loss")


def profile() -> ModelProfile:
    """Figures by hand: each layer takes a millisecond forward and two backward."""
    tensors = ("input", *NAMES)
    layers = tuple(
        LayerProfile(name=name, kind="Layer", inputs=(tensors[i],), outputs=(name,) if name != "loss" else (),
                     param_bytes=100, optimizer_state_bytes=100)
        for i, name in enumerate(NAMES)
    )  # fmt: skip
    measured = tuple(
        LayerMeasurement(forward_ns=10**6, input_grad_ns=10**6, weight_grad_ns=10**6, stash_bytes=10, workspace_bytes=0,
                         output_bytes=(10,) * len(layer.outputs))
        for layer in layers
    )  # fmt: skip
    return ModelProfile(
        model="test",
        factory=FACTORY,
        device=DeviceKind(kind="cpu", name="none", memory_bytes=2**30),
        dtype="float64",
        optimizer="sgd-momentum",
        layers=layers,
        measurements=(Measurement(microbatch_size=3, layers=measured),),
    )


def plan(num_stages: int) -> Plan:
    cuts, order = {1: (), 2: (3,)}[num_stages], named_order("1f1b", num_stages, 4)
    made = make_plan(NAMES[:-1], cuts, tuple(range(num_stages)), order, 3, 4)
    return structs.replace(made, factory=FACTORY)


def join_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process the only one of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))


def test_training_continues_if_a_rank_is_killed_or_a_job_has_fewer_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapipe.torch_device.num_devices", lambda kind: 2)  # also where the tests may use one core only
    kept, reports, told = tmp_path / "kept", list[StepReport](), list[tuple[str, Plan]]()
    done = bapipe.run(
        plan(2), data=str(tmp_path / "killed"), steps=9, checkpoint=kept, checkpoint_every=2, timeout_s=60, replan=True,
        profiles=profile(), on_step=reports.append, on_replan=lambda *args: told.append(args),
    )  # fmt: skip
    ((why, made),) = told
    assert why.startswith("rank 1 (cpu1) was killed by SIGKILL at step 5")
    assert [stage.devices for stage in made.stages] == [("cpu0",)]
    assert (made.microbatch_size, made.num_microbatches) == (3, 4)
    assert done.devices == ("cpu0",)
    assert 9 - len(done.losses) in (2, 4)  # the checkpoint of step 4 may still have been on its way
    join_alone(monkeypatch)
    again = bapipe.run(
        plan(2), data="quiet", steps=14, checkpoint=kept, resume=True, replan=True, profiles=profile(),
        on_replan=lambda *args: told.append(args),
    )  # fmt: skip
    assert told[1][0] == "without cpu1"
    alone = bapipe.run(plan(1), data="quiet", steps=14)
    losses = {report.step: report.loss for report in reports} | dict(enumerate(again.losses, start=9))
    assert [losses[step] for step in range(14)] == pytest.approx(alone.losses, abs=1e-12)
    assert len(alone.losses) == 14


def test_without_replan_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    with pytest.raises(BapipeError) as caught:
        bapipe.run(plan(2), data="quiet", replan=True)
    assert str(caught.value) == "`replan` needs `checkpoint`, the folder to continue from"
    with pytest.raises(BapipeError) as caught:
        bapipe.run(plan(2), data="quiet", without=["cpu1"])
    assert str(caught.value) == "`without` cpu1 goes with `replan`"


def devices(num: int, used: int) -> Plan:
    """A plan with a stage on each of the first devices of a cluster."""
    made = make_plan(NAMES[:-1], tuple(range(1, used)), tuple(range(used)), named_order("1f1b", used, 4), 3, 4)
    device = made.cluster.devices[0]
    every = tuple(structs.replace(device, name=f"cpu{i}") for i in range(num))
    idle = ((),) * (num - used)
    return structs.replace(made, cluster=structs.replace(made.cluster, devices=every), order=(*made.order, *idle))


@pytest.mark.parametrize(
    ("num", "used", "without", "available", "lost"),
    [
        (4, 3, [], 4, []),
        (4, 3, [], 3, ["cpu3"]),  # the one without a stage
        (4, 3, [], 2, ["cpu2", "cpu3"]),
        (4, 3, ["cpu3"], 3, ["cpu3"]),
        (4, 3, ["cpu0"], 3, ["cpu0"]),
        (4, 3, ["cpu0"], 2, ["cpu0", "cpu3"]),
    ],
)
def test_devices_named_as_lost_are_removed(
    num: int, used: int, without: list[str], available: int, lost: list[str]
) -> None:
    assert lost_devices(devices(num, used), without, available) == tuple(lost)


def test_devices_that_are_lost_stay_so_though_the_first_plan_uses_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan_module, "num_available_devices", lambda plan: 3)
    tried = []

    def train(plan: Plan, resume: bool) -> TrainResult:
        tried.append(plan.used_devices)
        raise RunFailed("one is lost", lost=plan.used_devices[-1:])

    with pytest.raises(RunFailed):
        run_with_replanning(
            devices(3, 2), {"cpu": profile()}, train, without=["cpu2"], resume=False, on_replan=lambda why, made: None
        )
    assert tried == [("cpu0", "cpu1"), ("cpu0",)]


def test_unknown_lost_devices_are_refused() -> None:
    with pytest.raises(BapipeError, match=r"^the plan has no device 'gpu0'; it has cpu0, cpu1$"):
        lost_devices(devices(2, 2), ["gpu0"], 2)
    with pytest.raises(BapipeError, match=r"^no device of the plan remains$"):
        lost_devices(devices(2, 2), ["cpu0", "cpu1"], 2)


def test_each_process_of_a_job_gets_a_stage() -> None:
    slow = devices(3, 3)
    link = structs.replace(slow.cluster.intra_host, latency_ns=10**12)
    slow = structs.replace(slow, cluster=structs.replace(slow.cluster, intra_host=link, inter_host=link))
    assert [stage.devices for stage in replan(slow, ["cpu1"], {"cpu": profile()}, None).stages] == [("cpu0",)]
    made = replan(slow, ["cpu1"], {"cpu": profile()}, 2)
    assert {name for stage in made.stages for name in stage.devices} == {"cpu0", "cpu2"}
    assert [device.name for device in made.cluster.devices] == ["cpu0", "cpu2"]
    assert (made.factory, made.model) == (slow.factory, "test")


def test_a_lost_group_takes_the_links_of_its_members_with_it() -> None:
    two = devices(2, 2)
    group = Device(name="g", host="local", kind="pair", memory_bytes=1, members=("a", "b"))
    link = Link(source="a", target="b", bytes_per_s=5, latency_ns=1)
    cluster = structs.replace(two.cluster, devices=(*two.cluster.devices, group), links=(link,))
    made = replan(structs.replace(two, cluster=cluster, order=(*two.order, ())), ["g"], {"cpu": profile()}, None)
    assert [device.name for device in made.cluster.devices] == ["cpu0", "cpu1"]
    assert made.cluster.links == ()


@pytest.mark.parametrize(("limit", "margin"), [(2000, 0.0), (3000, 1 / 3), (None, 0.5)])
def test_the_memory_that_a_plan_may_use_stays_the_same(limit: int | None, margin: float) -> None:
    """Each may use 2,000 of the 4,000 bytes of a device; the fastest plan on two devices would need 2,170."""
    known, where = {"cpu": profile()}, devices(3, 3).cluster
    where = structs.replace(where, devices=[structs.replace(device, memory_bytes=4000) for device in where.devices])
    options = PlanOptions(minibatch_size=12, memory_limit_bytes=limit, memory_margin=margin)
    again = replan(plan_once(known, where, options), ["cpu2"], known, None)
    assert again.certificate.memory == options.memory
    assert again.prediction.peak_bytes <= 2000
    free = replan(plan_once(known, where, PlanOptions(minibatch_size=12)), ["cpu2"], known, None)
    assert free.prediction.peak_bytes == 2170


def test_fewer_devices_may_use_more_than_a_plan_of_the_least_memory_needs() -> None:
    known, where = {"cpu": profile()}, devices(3, 3).cluster
    options = PlanOptions(minibatch_size=12, replicas=False, memory_margin=0.25, goal=bapipe.Goal(least="memory"))
    least = bapipe.plan(known, where, options)
    again = replan(least, ["cpu2"], known, None)
    assert again.prediction.peak_bytes > least.prediction.peak_bytes
    assert again.certificate.memory == MemoryLimit(margin=0.25)


def test_cached_profiles_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known, where = {"cpu": profile()}, devices(2, 2).cluster
    made = plan_once(known, where, PlanOptions(minibatch_size=12))
    with pytest.raises(BapipeError) as caught:
        profiles_for_replanning(made, {})
    assert str(caught.value) == (
        "the cpu profile that the plan was made from is not cached on this machine: give it in `profiles`"
    )
    assert profiles_for_replanning(made, known) == known
    assert plan_cached(known, where, PlanOptions(minibatch_size=12)) == made
    assert profiles_for_replanning(made, {}) == known
    other = structs.replace(profile(), layers=profile().layers[:-1],
                            measurements=(Measurement(microbatch_size=3, layers=profile().measurements[0].layers[:-1]),))  # fmt: skip
    with pytest.raises(BapipeError) as caught:
        profiles_for_replanning(made, {"cpu": other})
    assert str(caught.value) == "the cpu profile, of test, has other layers than the plan of test"
