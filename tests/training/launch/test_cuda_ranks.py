"""Which CUDA device a rank gets, and which rank hangs, without a GPU."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from threading import Timer
from typing import Any

import pytest
import torch

from bapipe.errors import BapipeError, RunFailed
from bapipe.formats.cluster import Device
from bapipe.job.groups import barrier, init_proven_group
from bapipe.runtime.peak_memory import check_free_memory
from bapipe.stop_signals import StopRequest
from bapipe.training.launch import processes, worker
from bapipe.training.launch.worker import RankJob, StepStarted, describe_failure
from bapipe.training.train import _place


def job(names: tuple[str, ...], places: tuple[int, ...]) -> RankJob:
    return RankJob(
        worker=print,
        arguments=(),
        names=names,
        places=places,
        kind="cuda",
        timeout_s=60.0,
        stops_between_steps=False,
        facts={},
        memory_advice=(),
    )


def test_ranks_on_gpus_meet_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch warns, in the user's terminal, that it takes the current one."""
    met: list[object] = []
    monkeypatch.setattr("torch.distributed.barrier", lambda _, device_ids: met.append(device_ids))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend in ("gloo", "nccl"):
        monkeypatch.setattr("torch.distributed.get_backend", lambda _, backend=backend: backend)
        barrier()
    assert met == [None, [3]]


@pytest.fixture
def cuda_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[torch.device]]:
    def have(number: int) -> list[torch.device]:
        current: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return have


def test_places_are_counted_on_each_host() -> None:
    hosts = ("a", "a", "b", "a", "b")
    devices = tuple(Device(name=f"cpu{i}", host=host, kind="cuda", memory_bytes=1) for i, host in enumerate(hosts))
    assert [_place(device, devices) for device in devices] == [0, 1, 0, 2, 1]


def test_a_rank_gets_the_device_of_the_plan(cuda_devices: Callable[[int], list[torch.device]]) -> None:
    current = cuda_devices(4)
    assert worker._prepare(job(("cuda2", "cuda3"), (2, 3)), 1) == torch.device("cuda", 3)
    assert current == [torch.device("cuda", 3)]


def test_a_process_that_sees_one_device_takes_it(
    cuda_devices: Callable[[int], list[torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_devices(1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert worker._prepare(job(("cuda0", "cuda1"), (0, 1)), 1) == torch.device("cuda", 0)


def test_a_device_that_is_not_there_is_named(cuda_devices: Callable[[int], list[torch.device]]) -> None:
    cuda_devices(2)
    with pytest.raises(BapipeError, match=r"'cuda3' is device 3 of its host in the plan's cluster.*finds 2 CUDA"):
        worker._prepare(job(("cuda2", "cuda3"), (2, 3)), 1)


def nccl_error(kind: str, name: str, reason: str) -> RuntimeError:
    """Returns an error of NCCL as torch raises it."""
    return torch.distributed.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:94, {kind} (run with "
        f"NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n{name}: what this usually means.\nLast error:\n{reason}"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            nccl_error("unhandled cuda error", "ncclUnhandledCudaError", "Cuda failure 2 'out of memory'"),
            "ran out of memory at step 0: DistBackendError: Cuda failure 2 'out of memory'; plan with less memory",
        ),
        (
            nccl_error("invalid usage", "ncclInvalidUsage", "Duplicate GPU detected : rank 1 and rank 0"),
            "failed at step 0: DistBackendError: Duplicate GPU detected : rank 1 and rank 0",
        ),
        (
            nccl_error("remote process exited or there was a network error", "ncclRemoteError", "socket closed"),
            "lost another rank at step 0: DistBackendError: socket closed",
        ),
        (
            nccl_error("internal error", "ncclInternalError", "Net : Connection closed by remote peer"),
            "lost another rank at step 0: DistBackendError: Net : Connection closed by remote peer",
        ),
        (
            nccl_error(
                "unhandled system error", "ncclSystemError", "Error while creating shared memory segment /dev/shm/x"
            ),
            "failed at step 0: DistBackendError: Error while creating shared memory segment /dev/shm/x",
        ),
        (
            torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."),
            "lost another rank at step 0: DistBackendError: NCCL communicator was aborted on rank 0.",
        ),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
            "ran out of memory at step 0: RuntimeError: CUDA error: out of memory; plan with less memory",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "ran out of memory at step 0: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
            "`cublasCreate(handle)`; plan with less memory",
        ),
        (
            RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"),
            "failed at step 0: RuntimeError: CUDA error: device-side assert triggered",
        ),
    ],
)
def test_an_error_of_the_gpu_or_of_nccl_is_told_by_its_reason(error: Exception, message: str) -> None:
    failure = worker._failure_of(error, 60.0, None)
    assert describe_failure(failure, job(("cuda0", "cuda1"), (0, 1)), 0, " at step 0") == f"rank 0 (cuda0) {message}"


class Ended:
    """A process that has ended, or one that still runs."""

    def __init__(self, index: int, code: int | None) -> None:
        self.index, self._code = index, code

    def exit_code(self, _: float) -> int | None:
        return self._code


def test_the_rank_that_hangs_is_the_silent_one_not_those_that_nccl_ends() -> None:
    three = job(("cuda0", "cuda1", "cuda2"), (0, 1, 2))
    codes = (-signal.SIGABRT, None, -signal.SIGABRT)
    running: list[Any] = [Ended(index, code) for index, code in enumerate(codes)]
    ranks = [processes._RankState(name, process) for name, process in zip(three.names, running, strict=True)]
    for rank in (ranks[0], ranks[2]):
        processes._note_end(rank, three)
    error = processes._error(ranks, three, StopRequest())
    assert str(error) == "rank 1 (cuda1) hangs: rank 0 (cuda0) waited more than 60 s for another rank"
    assert getattr(error, "lost", None) == ("cuda1",)


def test_a_rank_hangs_where_nccl_ends_the_others_seconds_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchdog gives records of transfers time to be written before it ends the process."""
    monkeypatch.setattr(processes, "_END_S", 0.0)
    monkeypatch.setattr(processes, "_NCCL_SETTLE_S", 0.1)
    monkeypatch.setattr(Ended, "is_paused", lambda _: False, raising=False)
    two = replace(job(("cuda0", "cuda1"), (0, 1)), timeout_s=0.1)
    running: list[Any] = [Ended(0, -signal.SIGABRT), Ended(1, None)]
    ranks = [processes._RankState(name, process) for name, process in zip(two.names, running, strict=True)]
    batches: processes._Batches = SimpleQueue()
    batches.put([(process, StepStarted(3)) for process in running])
    watchdog = Timer(0.8, batches.put, ([(running[0], None)],))
    watchdog.start()
    with pytest.raises(RunFailed, match=r"^rank 1 \(cuda1\) hangs at step 3: rank 0 ") as caught:
        processes._follow(ranks, batches, two, None, StopRequest())
    assert caught.value.lost == ("cuda1",)
    watchdog.join()


def test_what_nccl_waits_for_is_ended_by_the_given_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchdog then sleeps four times what the variable says: by default, a minute. A store has 5 minutes."""
    name = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    store: Any = torch.distributed.HashStore()
    seen: list[tuple[str | None, timedelta]] = []

    def noted(*_: object, **__: object) -> None:
        seen.append((os.environ.get(name), store.timeout))
        raise RuntimeError("no GPU")

    monkeypatch.setattr(torch.distributed, "init_process_group", noted)
    for given in (None, "15000"):
        monkeypatch.delenv(name)
        if given:
            monkeypatch.setenv(name, given)
        with pytest.raises(RuntimeError, match="no GPU"):
            init_proven_group("cuda", store, 0, ["cuda0"], b"", timedelta(hours=1))
    assert seen == [("250", timedelta(hours=1)), ("15000", timedelta(hours=1))]


def test_torch_without_nccl_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(BapipeError, match=r"^this torch has no NCCL, .*: install torch for Linux and CUDA$"):
        init_proven_group("cuda", torch.distributed.HashStore(), 0, ["cuda0"], b"", timedelta(seconds=1))


def test_a_gpu_that_others_use_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 800))
    check_free_memory(torch.device("cuda", 1), "cuda1", 100)
    check_free_memory(torch.device("cpu"), "cpu0", 10**18)
    with pytest.raises(BapipeError, match=r"'cuda1' has 100 of 800 bytes free, .* 101: another process"):
        check_free_memory(torch.device("cuda", 1), "cuda1", 101)


def test_ranks_on_gpus_keep_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert processes._cuda_environment() == both
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert processes._cuda_environment() == {}
