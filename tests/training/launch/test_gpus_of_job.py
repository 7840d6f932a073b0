"""Ranks of a job on GPUs compare where they run with the plan's cluster, before they connect."""

import socket
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Device
from bapipe.formats.profile import DeviceKind
from bapipe.training.launch import gpus_of_job, processes, worker
from bapipe.training.launch.gpus_of_job import RankGpu, check_one_rank_per_gpu, gpus_of_all, unlike_the_plan
from bapipe.training.launch.worker import RankJob

HOW = (
    "ranks are numbered host by host, so list the cluster's devices in that order, and start on each host as many "
    "processes as the plan has devices there, the hosts in the plan's order (node-rank of torchrun)"
)


def device(name: str, model: str = "H200") -> Device:
    """Returns a device of the host that is the first letter of its name."""
    return Device(name=name, host=name[0], kind="cuda", memory_bytes=1, model=model)


def gpu(place: str, model: str = "H200") -> RankGpu:
    """Returns a GPU of the machine that is the first letter of a place such as M0."""
    return RankGpu(machine=place[0], model=model, uuid=place)


def test_a_job_that_runs_where_it_is_planned_is_silent() -> None:
    devices, found = [device(name) for name in ("a1", "b0", "b1")], [gpu(place) for place in ("M1", "N0", "N1")]
    check_one_rank_per_gpu(devices, found)
    assert list(unlike_the_plan(devices, found)) == []


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """torchrun starts ranks 0 and 1 on machine M; they are the first devices of two hosts of the plan."""
    devices = [device(name) for name in ("a0", "b0", "a1", "b1")]
    with pytest.raises(BapipeError) as caught:
        check_one_rank_per_gpu(devices, [gpu(place) for place in ("M0", "M0", "N1", "N1")])
    assert str(caught.value) == (
        "rank 0 (a0 of the plan's host 'a') and rank 1 (b0 of the plan's host 'b') have the same GPU of machine 'M': "
        + HOW
    )
    unknown = RankGpu(machine="M", model="H200", uuid=None)
    check_one_rank_per_gpu(devices, [unknown] * 4)


@pytest.mark.parametrize(
    ("names", "places", "difference"),
    [
        (
            ("a0", "b1", "a1", "b0"),
            ("M0", "M1", "N1", "N0"),
            "rank 0 (a0 of the plan's host 'a') and rank 1 (b1 of the plan's host 'b') run on M, so",
        ),
        (
            ("a0", "a1"),
            ("M0", "N1"),
            "rank 0 (a0 of the plan's host 'a') and rank 1 (a1 of the plan's host 'a') run on M and N, so",
        ),
    ],
)
def test_hosts_that_are_not_those_of_the_plan_are_named(
    names: tuple[str, ...], places: tuple[str, ...], difference: str
) -> None:
    (found,) = unlike_the_plan([device(name) for name in names], [gpu(place) for place in places])
    assert found == f"{difference} their transfers do not take as long as predicted: {HOW}"


def test_other_gpus_than_planned_are_named() -> None:
    devices, found = [device("a0"), device("b0", "V100")], [gpu("M0", "V100"), gpu("N0")]
    assert list(unlike_the_plan(devices, found)) == [
        "rank 0 (a0 of the plan's host 'a') is planned for 'H200' and has 'V100', so its times and memory are not those "
        "predicted: start the hosts in the plan's order, or profile and plan for these"
    ]


def test_every_rank_knows_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "M")
    monkeypatch.setattr(
        gpus_of_job, "describe", lambda device: DeviceKind(kind="cuda", name=f"H{device.index}", memory_bytes=1)
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index))
    store: Any = torch.distributed.HashStore()
    seen: list[list[RankGpu]] = []
    ranks = [
        Thread(target=lambda n=n: seen.append(gpus_of_all(store, n, 2, torch.device("cuda", n)))) for n in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert seen == 2 * [[RankGpu(machine="M", model=f"H{n}", uuid=str(n)) for n in range(2)]]


def test_ranks_on_gpus_compare_before_they_connect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, store = torch.device("cuda", 0), torch.distributed.HashStore()
    job = RankJob(
        worker=print,
        arguments=(),
        names=("a0", "b0"),
        places=(0, 0),
        kind="cuda",
        timeout_s=60.0,
        stops_between_steps=False,
        facts={},
        memory_advice=(),
        devices=(device("a0"), device("b0")),
    )
    monkeypatch.setattr(worker, "gpus_of_all", lambda *_: [gpu("M0"), gpu("M0")])
    with pytest.raises(BapipeError, match="have the same GPU of machine 'M'"):
        worker._compare_gpus(job, store, 0, here)  # type: ignore[arg-type]
    monkeypatch.setattr(worker, "gpus_of_all", lambda *_: [gpu("M0"), gpu("M1")])
    for rank in range(2):
        worker._compare_gpus(job, store, rank, here)  # type: ignore[arg-type]
    (warning,) = caplog.messages  # of rank 0
    assert "run on M, so their transfers" in warning


@pytest.mark.parametrize(
    ("names", "where"),
    [
        ((), "on one host with nproc-per-node=3 for torchrun"),
        (("a0", "a1", "a2"), "on one host with nproc-per-node=3 for torchrun"),
        (("a1", "b0", "b1"), "1 on host 'a', 2 on host 'b'"),
    ],
)
def test_what_is_advised_on_the_number_of_processes_are_the_plan_s_hosts(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], where: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BapipeError) as caught:
        processes.launch(print, ["x", "y", "z"], kind="cuda", devices=[device(name) for name in names])
    assert str(caught.value) == (
        f"the plan has a stage on 3 devices but the job has 2 processes: start 3, {where}, or plan for 2 devices"
    )
