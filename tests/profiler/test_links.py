"""The cost of a message, fitted and measured."""

import os
import sys

import pytest

from bapipe.errors import BapipeError, RunFailed
from bapipe.formats.cluster import Bandwidth
from bapipe.profiler.cluster import cluster
from bapipe.profiler.links import fit, measure_link
from bapipe.profiler.spawn import measure_in_ranks
from bapipe.torch_device import num_devices

SIZES = (1_000, 10_000, 100_000, 1_000_000)


def test_fit_finds_the_line() -> None:
    times_ns = [100_000 + num_bytes // 2 for num_bytes in SIZES]
    assert fit(SIZES, times_ns) == Bandwidth(bytes_per_s=2_000_000_000, latency_ns=100_000)


def test_fit_has_no_negative_latency() -> None:
    link = fit(SIZES, [10, 200, 3_000, 40_000])
    assert link.latency_ns == 0
    assert link.bytes_per_s > 0
    assert fit(SIZES, [500, 400, 300, 200]).bytes_per_s > 0


def test_cluster_of_one_device() -> None:
    made = cluster(1, "cpu")
    (device,) = made.devices
    assert (device.name, device.host, device.kind) == ("cpu0", "host0", "cpu")
    assert device.memory_bytes > 0
    assert made.intra_host == made.inter_host
    assert 0 <= made.intra_host.latency_ns < 10**9
    assert 10**6 < made.intra_host.bytes_per_s < 10**12
    assert isinstance(made.intra_host_sum, Bandwidth)  # the cores sum gradients themselves
    assert 0 <= made.intra_host_sum.latency_ns < 10**9
    assert 10**6 < made.intra_host_sum.bytes_per_s < 10**12


def test_more_devices_than_the_machine_has() -> None:
    present = num_devices("cpu")
    with pytest.raises(BapipeError) as error:
        cluster(present + 1, "cpu")
    assert str(error.value) == (
        f"{present + 1} devices of kind 'cpu' are more than this machine has: choose {present} or fewer, "
        "or write a cluster file for the machines that have more"
    )
    with pytest.raises(BapipeError) as error:
        cluster(0, "cpu")
    assert str(error.value) == f"a cluster cannot have 0 devices: want 1 to {present}"
    with pytest.raises(BapipeError) as error:
        cluster(1, "tpu")
    assert str(error.value) == "unknown device kind 'tpu'; want one of cpu, cuda"


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(RunFailed) as error:
        measure_link(timeout_s=0.05)
    assert str(error.value) == "measuring the link took longer than 0.05 s: try again on a quieter machine"


def test_noise_that_hides_the_bytes_does_not_make_a_link_infinitely_fast() -> None:
    found = fit((1_000, 1_000_000), (500_000, 500_001))
    assert found.bytes_per_s == round(2 * 10**15 / 500_001)  # twice the fastest message
    assert 0 < found.latency_ns <= 500_000


def test_the_rate_of_a_bursty_link_is_its_sustained_rate() -> None:
    def limited_ns(num_bytes: int) -> int:
        """64 KiB go at once, the rest at 100 MB/s."""
        return 50_000 + max(num_bytes // 10, (num_bytes - 2**16) * 10)

    sizes = tuple(2**exponent for exponent in (12, 15, 18, 20, 22, 24))
    found = fit(sizes, [limited_ns(num_bytes) for num_bytes in sizes])
    assert found.bytes_per_s == pytest.approx(10**8, rel=1e-3)
    assert found.latency_ns == 0
    assert found.transfer_ns(2**24) == pytest.approx(limited_ns(2**24), rel=0.01)


def interfaces(rank: int, kind: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.endswith("_SOCKET_IFNAME")}


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces have other names there")
def test_nobody_outside_can_connect_to_what_measures_links() -> None:
    """`docs/security.md` says so."""
    found = measure_in_ranks(interfaces, 1, "cpu", "nothing", timeout_s=60)
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
