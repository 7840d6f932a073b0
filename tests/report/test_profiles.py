"""The shape of a model in a table, and a cluster's links."""

import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.host_times import HostTimes
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import HOST_OVER_DEVICE, ONE_LAYER, DeviceKind, ModelProfile
from bapipe.report.profiles import render_cluster, render_profile, shape_table
from tests.builders import chain
from tests.formats.test_profile import one_layer, with_host


def test_the_last_layer_has_no_cut_after_it() -> None:
    layers = tuple(
        LayerProfile(
            name=name, kind="Linear", inputs=(source,), outputs=(name,), param_bytes=0, optimizer_state_bytes=0
        )
        for source, name in (("x", "a"), ("a", "b"))
    )
    measured = LayerMeasurement(
        forward_ns=10**6, input_grad_ns=10**6, weight_grad_ns=10**6, stash_bytes=0, output_bytes=(2**20,)
    )
    profile = ModelProfile(
        model="chain",
        device=DeviceKind(kind="cpu", name="cpu", memory_bytes=1),
        dtype="float32",
        optimizer="sgd",
        layers=layers,
        measurements=(Measurement(microbatch_size=2, layers=(measured, measured)),),
    )
    table = shape_table(profile)
    columns = [list(map(str, column.cells)) for column in table.columns]
    assert columns[1:4] == [["a", "b"], ["3.00", "3.00"], ["1.00", ""]]


def test_a_cluster_shows_its_devices_and_links() -> None:
    link = Bandwidth(bytes_per_s=10**9, latency_ns=2000)
    device = Device(name="d0", host="h", kind="cpu", memory_bytes=2**30)
    devices, links = render_cluster(Cluster(devices=(device,), intra_host=link, inter_host=link))
    assert not isinstance(devices, str)
    assert not isinstance(links, str)
    assert list(devices.columns[0].cells) == ["d0"]
    assert [list(column.cells) for column in links.columns] == [
        ["within a host", "between hosts (there is one: not measured)"], ["1.00", "1.00"], ["2.00", "2.00"],
    ]  # fmt: skip


def test_the_clock_over_the_gpu_is_a_list_of_numbers() -> None:
    profile = one_layer((2, 5), (4, 30))
    of_gpu = replace(profile, environment={HOST_OVER_DEVICE: {"2": 1.8466, "4": 1.0}})
    told = "time by the clock on the wall over that of the GPU (micro-batch size): 1.85 (2), 1.00 (4)"
    assert told in list(render_profile(of_gpu))


@pytest.mark.parametrize(
    ("host_ns", "words"),
    [
        (2, "the device is the limit of F and B, not the host, at all micro-batch sizes"),
        (40, "the device is the limit of F and B from micro-batches of 4 on; below, the host is"),
        (100, "the host is the limit of F and B, up to micro-batches of 8"),
    ],
)
def test_a_profile_with_times_of_the_host_says_where_it_is_the_limit(host_ns: int, words: str) -> None:
    """F and B take 3 x 5, 3 x 30 and 3 x 60 ns on the device, twice `host_ns` on the host."""
    profile = one_layer((1, 5), (4, 30), (8, 60))
    host = HostTimes(forward_ns=host_ns, input_grad_ns=0, weight_grad_ns=0, backward_ns=host_ns)
    assert words not in list(render_profile(profile))
    assert words in list(render_profile(with_host(profile, dict.fromkeys((1, 4, 8), host))))


def test_modules_of_one_class_that_are_one_layer_for_the_same_reason_share_a_line() -> None:
    kinds = {"a": "Norm", "b": "Norm", "c.d": "Norm", "e": "Gate"}
    reasons = {path: f"its forward changes '{path}.mean'; to cut it, wait" for path in kinds}
    reasons["b"] = "its forward draws"
    made = chain([1] * len(kinds))
    profile = replace(
        made,
        layers=tuple(
            replace(layer, name=name, kind=kind) for layer, (name, kind) in zip(made.layers, kinds.items(), strict=True)
        ),
        environment={ONE_LAYER: reasons},
    )
    shown = [line for line in render_profile(profile) if isinstance(line, str) and "one layer" in line]
    assert shown == [
        "'a' and 1 more of class Norm are one layer each: its forward changes 'a.mean'; to cut it, wait",
        "'b' is one layer: its forward draws",
        "'e' is one layer: its forward changes 'e.mean'; to cut it, wait",
    ]
