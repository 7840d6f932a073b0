"""Three ranks of a job probe their links; all three get the same cluster."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, Mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, RunFailed
from bapipe.formats.cluster import AllReduce, Bandwidth, Cluster, Device, Link
from bapipe.formats.codec import decode, encode, read
from bapipe.profiler import probe
from bapipe.profiler.probe import PairFigures
from bapipe.torchrun import Job
from tests import PYTHONPATH


def devices(*hosts: str) -> list[Device]:
    return [Device(name=f"cpu{i}", host=host, kind="cpu", memory_bytes=1) for i, host in enumerate(hosts)]


def line(bytes_per_s: int, latency_ns: int) -> list[int]:
    return [latency_ns + num_bytes * 10**9 // bytes_per_s for num_bytes in probe.MESSAGE_BYTES]


def test_each_ordered_pair_is_a_link() -> None:
    alone_ns = 1000 + probe.MESSAGE_BYTES[-1]
    found = {
        (0, 1): PairFigures(
            there_ns=line(10**9, 1000), back_ns=line(2 * 10**9, 500), both_ns=2 * alone_ns, slowdown=0.25
        ),
        (0, 2): PairFigures(there_ns=line(10**8, 7), back_ns=line(10**8, 7), both_ns=1, slowdown=0.5),
        (1, 2): PairFigures(there_ns=line(10**8, 7), back_ns=line(10**8, 7), both_ns=1, slowdown=0.5),
    }
    sums = [AllReduce(num_bytes=4, ns=5)]
    made = probe._cluster(devices("a", "a", "b"), found, sums)
    assert [(link.source, link.target) for link in made.links] == [
        ("cpu0", "cpu1"), ("cpu0", "cpu2"), ("cpu1", "cpu0"), ("cpu1", "cpu2"), ("cpu2", "cpu0"), ("cpu2", "cpu1"),
    ]  # fmt: skip
    assert made.link(0, 1) == Bandwidth(bytes_per_s=10**9, latency_ns=1000)
    assert made.link(1, 0).bytes_per_s == pytest.approx(2 * 10**9, rel=1e-3)
    assert made.inter_host.bytes_per_s == pytest.approx(10**8, rel=1e-3)
    assert made.intra_host in (made.link(0, 1), made.link(1, 0))
    assert made.probe.both_ways == 1.0  # type: ignore[union-attr]  # of 0.5, 1, 1 the middle one
    assert made.probe.compute_slowdown == 0.5  # type: ignore[union-attr]
    assert made.intra_host_sum is msgspec.UNSET  # the ranks that sum are on two hosts
    assert decode(encode(made)) == made


def test_cores_of_one_host_sum_gradients_themselves() -> None:
    there = line(10**9, 1000)
    found = {(0, 1): PairFigures(there_ns=there, back_ns=there, both_ns=1, slowdown=0.0)}
    sums = [AllReduce(num_bytes=n, ns=2 * (700 + n)) for n in probe.MESSAGE_BYTES]  # two messages of half of it
    made = probe._cluster(devices("a", "a"), found, sums)
    assert made.intra_host_sum == Bandwidth(bytes_per_s=5 * 10**8, latency_ns=700)


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_ns", "repeats"),
    [
        (10**9, 10_000, [20, 20, 20, 20, 6, 6]),  # 1 GB/s: all sizes
        (2_500_000, 100_000, [20, 20, 19, 4]),  # 20 Mbit/s: 4 MB would take 1.7 s
        (125_000, 1_000_000, [20, 7]),  # 1 Mbit/s: 256 KB would take 2.1 s
        (10**9, 300_000_000, [20, 2, 6, 6, 6, 6]),  # far away
    ],
)
def test_messages_that_take_long_on_a_slow_link_are_left_out(
    bytes_per_s: int, latency_ns: int, repeats: list[int]
) -> None:
    asked = []

    def time_ns(num_bytes: int, num_repeats: int) -> int:
        asked.append((num_bytes, num_repeats))
        return latency_ns + num_bytes * 10**9 // bytes_per_s

    times_ns = probe._by_size(time_ns)
    assert asked == list(zip(probe.MESSAGE_BYTES[: len(repeats)], repeats, strict=True))
    there = PairFigures(there_ns=times_ns, back_ns=times_ns[:2], both_ns=1, slowdown=0.0)
    assert there.large_bytes == probe.MESSAGE_BYTES[1]
    made = probe._cluster(devices("a", "b"), {(0, 1): there}, [])
    assert made.link(0, 1).transfer_ns(2**20) == pytest.approx(latency_ns + 2**20 * 10**9 / bytes_per_s, rel=0.1)


def test_one_device_has_no_links() -> None:
    made = probe._cluster(devices("a"), {}, [])
    assert made.links == ()
    assert b'"probe"' not in encode(made)


def check(made: Cluster, num_devices: int) -> None:
    names = [f"cpu{i}" for i in range(num_devices)]
    assert [device.name for device in made.devices] == names
    pairs = {(link.source, link.target) for link in made.links}
    assert pairs == {(a, b) for a in names for b in names if a != b}
    for link in made.links:
        assert isinstance(link, Link)
        assert link.bytes_per_s > 0  # how fast depends on the machine, and on what else it does
    assert 0 <= made.probe.both_ways <= 1  # type: ignore[union-attr]
    assert [r.num_bytes for r in made.probe.all_reduce] == list(probe.MESSAGE_BYTES)  # type: ignore[union-attr]
    assert all(r.ns > 0 for r in made.probe.all_reduce)  # type: ignore[union-attr]


def test_ranks_of_this_machine() -> None:
    made = decode(encode(probe.probe_here(3, "cpu", 120)))
    assert isinstance(made, Cluster)
    check(made, 3)


@pytest.mark.parametrize(
    ("found", "rank", "local_rank", "device"),
    [
        (4, 5, "1", 1),
        (4, 5, "", 1),  # where the job does not say so, ranks of a host follow one another
        (1, 5, "1", 0),  # Slurm and containers may show a process its own GPU only
    ],
)
def test_a_rank_of_a_job_probes_with_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, found: int, rank: int, local_rank: str, device: int
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(probe, "open_store", Mock(side_effect=RunFailed("no other rank")))
    _join(monkeypatch, rank, 8, local_rank)
    with pytest.raises(RunFailed, match="no other rank"):
        probe.probe_job(Job(rank, 8), "cuda", Mock())
    assert current == [torch.device("cuda", device)]


@pytest.mark.parametrize("local_rank", ["0", ""])
def test_a_rank_without_a_gpu_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch, local_rank: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _join(monkeypatch, 0, 1, local_rank)
    with pytest.raises(BapipeError, match="torch finds no device 'cuda:0' on this machine: choose `device` cpu"):
        probe.probe_job(Job(0, 1), "cuda", Mock())


def _join(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, local_rank: str) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    else:
        monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 MiB"), ", as rank 3 has no memory left: "),
        (RuntimeError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), ", as rank 3 has no memory left: "),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), ", as another rank has ended or "),
        (RuntimeError("CUDA error: an illegal memory access"), ": RuntimeError: CUDA error: an illegal"),
    ],
)
def test_what_ended_the_measurement_is_told(monkeypatch: pytest.MonkeyPatch, error: RuntimeError, said: str) -> None:
    for name in ("open_store", "meet", "choose_interface", "outer_address", "init_proven_group", "check_interface"):
        monkeypatch.setattr(probe, name, MagicMock())
    monkeypatch.setattr(probe, "probe", Mock(side_effect=error))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "destroy_process_group", Mock())
    with pytest.raises(RunFailed) as raised:
        probe.probe_job(Job(3, 8), "cpu", Mock())
    assert str(raised.value).startswith(f"the links cannot be measured{said}")


def test_a_job_of_torchrun_is_probed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
         sys.executable, "-c", "from bapipe.cli import main; main()", "cluster", "--probe", "-o", "cluster.json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(read(tmp_path / "cluster.json", Cluster), 2)
    assert done.stdout.count("wrote cluster.json") == 1
    assert "in both directions at once" in done.stdout
