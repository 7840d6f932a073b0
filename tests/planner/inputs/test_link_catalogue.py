"""Clusters of devices that nobody here has."""

from random import Random

import pytest
from msgspec import UNSET, structs

import bapipe
from bapipe.errors import BapipeError
from bapipe.formats.profile import DeviceKind
from bapipe.planner.inputs.link_catalogue import CATALOGUE, catalogue_link, cluster_like, link_of_gpu
from tests.random_profiles import random_profile

H200 = DeviceKind(kind="cuda", name="NVIDIA H200", memory_bytes=140 * 2**30)


def profile() -> bapipe.ModelProfile:
    made = random_profile(Random(1), 4)
    return structs.replace(made, device=H200, environment={"framework_bytes": 2**29})


def test_devices_are_spread_over_hosts_with_the_catalogue_s_links() -> None:
    cluster = cluster_like(profile(), 8, 2, between="ndr400")
    assert [device.host for device in cluster.devices] == ["host0"] * 4 + ["host1"] * 4
    assert {device.memory_bytes for device in cluster.devices} == {140 * 2**30 - 2**29 - 2**30}
    assert cluster.intra_host == catalogue_link("nvlink4")
    assert cluster.intra_host.bytes_per_s == round(0.85 * 450e9)
    assert cluster.inter_host.bytes_per_s == round(0.85 * 50e9)
    links = "nvlink4 within a host, ndr400 between hosts"
    shared = " with a network card for each device (where n share one, divide its rate by n)"
    assert cluster.assumed_links == links + shared
    assert cluster_like(profile(), 2, 2, between="ndr400").assumed_links == links


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("NVIDIA H200", "nvlink4"),
        ("NVIDIA H100 80GB HBM3", "nvlink4"),
        ("NVIDIA H100 PCIe", "pcie5"),
        ("NVIDIA B200", "nvlink5"),
        ("NVIDIA A100-SXM4-80GB", "nvlink3"),
        ("NVIDIA A100-PCIE-40GB", "pcie4"),
        ("Tesla V100-SXM2-16GB", "nvlink2"),
        ("V100", "pcie3"),
        ("NVIDIA GeForce RTX 4090", "pcie4"),
    ],
)
def test_a_gpu_s_name_says_its_link(name: str, link: str) -> None:
    assert link_of_gpu(name) == link


def test_every_rate_has_a_source_and_later_generations_are_faster() -> None:
    assert all(link.source and link.datasheet_bytes_per_s > 0 for link in CATALOGUE.values())
    for family in (("nvlink2", "nvlink3", "nvlink4", "nvlink5"), ("pcie3", "pcie4", "pcie5"), ("hdr200", "ndr400")):
        rates = [CATALOGUE[name].datasheet_bytes_per_s for name in family]
        assert rates == sorted(set(rates))


def test_a_number_of_gpus_has_their_link_not_that_of_processes_on_a_cpu() -> None:
    plan = bapipe.plan(profile(), 2, minibatch_size=4)
    assert plan.cluster.intra_host == catalogue_link("nvlink4")
    assert plan.cluster.assumed_links == "nvlink4 within a host"
    on_cpu = bapipe.plan(random_profile(Random(1), 4), 2, minibatch_size=4)
    assert on_cpu.cluster.assumed_links is UNSET


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 2), "7 devices cannot be spread evenly over 2 hosts"),
        ((1, 2), "1 devices cannot be spread evenly over 2 hosts"),
        ((4, 2, "nvlink9"), "no link is named 'nvlink9': want one of nvlink2, nvlink3"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(BapipeError) as error:
        cluster_like(profile(), *arguments)
    assert str(error.value).startswith(message)


def test_a_cpu_s_profile_has_no_links_in_the_catalogue() -> None:
    with pytest.raises(BapipeError, match="of kind 'cpu', and the catalogue has links of GPUs"):
        cluster_like(structs.replace(profile(), device=structs.replace(H200, kind="cpu")), 2)
