"""Links that nobody here has measured: rates from datasheets, to plan for devices that one does not have.

A plan for such links says that they are assumed; a sweep of the explorer shows how it changes with their rate.
"""

from dataclasses import dataclass

from bapipe.device_types import type_of_kind
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.profile import ModelProfile
from bapipe.hardware import bytes_for_tensors

ACHIEVED_SHARE = 0.85
"""The share of a datasheet's rate that messages of some megabytes are taken to achieve."""

_GLOO_LATENCY_NS, _NVLINK_LATENCY_NS, _PCIE_LATENCY_NS = 40_000, 12_000, 15_000
_INFINIBAND_LATENCY_NS = 15_000
"""Assumed latencies of a message between processes, with the calls of NCCL or gloo: far above the wire's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueLink:
    """A kind of link between two devices.

    Attributes:
        datasheet_bytes_per_s: in one direction, to or from one device.
        source: where the rate is published.
    """

    datasheet_bytes_per_s: int
    latency_ns: int
    source: str

    @property
    def bandwidth(self) -> Bandwidth:
        """What a plan reckons with."""
        return Bandwidth(bytes_per_s=round(ACHIEVED_SHARE * self.datasheet_bytes_per_s), latency_ns=self.latency_ns)


def _link(gigabytes_per_s: float, latency_ns: int, source: str) -> CatalogueLink:
    rate = round(gigabytes_per_s * 1e9)
    return CatalogueLink(datasheet_bytes_per_s=rate, latency_ns=latency_ns, source=source)


CATALOGUE = {
    "nvlink2": _link(150, _NVLINK_LATENCY_NS, "NVIDIA V100 datasheet: NVLink 300 GB/s, both directions together"),
    "nvlink3": _link(300, _NVLINK_LATENCY_NS, "NVIDIA A100 datasheet: NVLink 600 GB/s, both directions together"),
    "nvlink4": _link(450, _NVLINK_LATENCY_NS, "NVIDIA H100 and H200 datasheets: NVLink 900 GB/s, both directions"),
    "nvlink5": _link(900, _NVLINK_LATENCY_NS, "NVIDIA B200 datasheet: NVLink 1.8 TB/s, both directions together"),
    "pcie3": _link(15.75, _PCIE_LATENCY_NS, "PCI Express 3.0, 16 lanes of 8 GT/s, encoded 128b/130b"),
    "pcie4": _link(31.5, _PCIE_LATENCY_NS, "PCI Express 4.0, 16 lanes of 16 GT/s, encoded 128b/130b"),
    "pcie5": _link(63, _PCIE_LATENCY_NS, "PCI Express 5.0, 16 lanes of 32 GT/s, encoded 128b/130b"),
    "hdr200": _link(25, _INFINIBAND_LATENCY_NS, "InfiniBand HDR, 4 lanes: 200 Gb/s"),
    "ndr400": _link(50, _INFINIBAND_LATENCY_NS, "InfiniBand NDR, 4 lanes: 400 Gb/s"),
    "eth25": _link(3.125, _GLOO_LATENCY_NS, "Ethernet, IEEE 802.3by: 25 Gb/s"),
    "eth100": _link(12.5, _GLOO_LATENCY_NS, "Ethernet, IEEE 802.3bm: 100 Gb/s"),
}
"""Links by name."""

_LINK_OF_GPU = (
    (("B200", "B100"), "nvlink5"),
    (("H100 PCIE", "H100 NVL"), "pcie5"),
    (("H200", "H100", "GH200", "H800"), "nvlink4"),
    (("A100-SXM", "A800-SXM"), "nvlink3"),
    (("V100-SXM",), "nvlink2"),
    (("V100", "P100", "T4", "RTX 20", "TITAN", "QUADRO"), "pcie3"),
)
"""Parts of a GPU's name, as its driver gives it, and the link between two of them; the first that fits holds."""


def link_of_gpu(name: str) -> str:
    """Returns the name of the link that GPUs of a model usually have between them within a host."""
    upper = name.upper()
    return next((link for parts, link in _LINK_OF_GPU if any(part in upper for part in parts)), "pcie4")


def catalogue_link(name: str) -> Bandwidth:
    """Returns what a plan reckons with for a link.

    Raises:
        BapipeError: there is no such link.
    """
    if name not in CATALOGUE:
        raise BapipeError(f"no link is named '{name}': want one of {', '.join(CATALOGUE)}")
    return CATALOGUE[name].bandwidth


def cluster_like(
    profile: ModelProfile,
    num_devices: int,
    num_hosts: int = 1,
    within: str | None = None,
    between: str = "eth100",
) -> Cluster:
    """Returns a cluster of devices like a profiled GPU, spread evenly over hosts, with links of the catalogue.

    A device has the memory of the profiled one, less what its framework took, and less what NCCL may take if there are
    several. `within` is by default the link that such GPUs usually have; `between` is that of a network card which each
    device has for itself.

    Raises:
        BapipeError: the devices cannot be spread evenly, an unknown link, or a profile of a CPU.
    """
    device = profile.device
    if type_of_kind(device.kind) != "cuda":
        raise BapipeError(
            f"the profile is of a device of kind '{device.kind}', and the catalogue has links of GPUs: measure the "
            "devices' links with `bapipe cluster`, or write a cluster file"
        )
    if num_hosts < 1 or num_devices < num_hosts or num_devices % num_hosts:
        raise BapipeError(f"{num_devices} devices cannot be spread evenly over {num_hosts} hosts")
    within = within or link_of_gpu(device.name)
    per_host = num_devices // num_hosts
    links = f"{within} within a host"
    if num_hosts > 1:
        links += f", {between} between hosts"
    if num_hosts > 1 and per_host > 1:
        links += " with a network card for each device (where n share one, divide its rate by n)"
    framework = profile.environment.get("framework_bytes", 0)
    framework_bytes = framework if isinstance(framework, int) else 0
    return Cluster(
        devices=tuple(
            Device(
                name=f"{device.kind}{i}",
                host=f"host{i // per_host}",
                kind=device.kind,
                memory_bytes=bytes_for_tensors(device.memory_bytes, framework_bytes, num_devices),
                model=device.name,
            )
            for i in range(num_devices)
        ),
        intra_host=catalogue_link(within),
        inter_host=catalogue_link(between),
        assumed_links=links,
    )
