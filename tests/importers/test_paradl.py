"""ParaDL's layer tables, worked out by hand."""

import re

import pytest

from bapipe.errors import BapipeError
from bapipe.importers import ImportMetadata, import_profile
from bapipe.importers.paradl import parse_paradl

HEADER = "Dataset|Digits\nInput|100x1x4x4\nModel|small\n"
ONE_TIME = f"""{HEADER}# first group
CONV_1a|1x4x4|1x2x3x3|2x4x4|0.000036
RELU|2x4x4|2x2x0x0|2x4x4|0

FC2|2x4x4|2x3x4x4|3x1x1|0
"""


def test_one_time_is_shared_out_by_multiplications() -> None:
    conv, relu, fc = parse_paradl(ONE_TIME, 10)
    # 18 weights at 16 places, and 96 weights at one: 288 and 96 of 384 multiplications of 360 us for ten samples.
    assert [a.forward_ns for a in (conv, relu, fc)] == [90_000, 0, 30_000]
    assert [a.backward_ns for a in (conv, relu, fc)] == [180_000, 0, 60_000]
    assert [a.param_bytes for a in (conv, relu, fc)] == [4 * 18, 0, 4 * 96]
    assert [a.output_bytes for a in (conv, relu, fc)] == [(4 * 32 * 10,), (4 * 32 * 10,), (4 * 3 * 10,)]
    assert [a.kind for a in (conv, relu, fc)] == ["CONV", "RELU", "FC"]
    assert [a.inputs for a in (conv, relu, fc)] == [("input",), ("CONV_1a:5",), ("RELU:6",)]


def test_times_of_every_layer_are_kept() -> None:
    timed = parse_paradl(f"{HEADER}A|1x2|1x1x1|1x2|0.000003\nB|1x2|1x1x1|1x2|0.000006\n", 2)
    assert [(a.forward_ns, a.backward_ns) for a in timed] == [(2000, 4000), (4000, 8000)]


def test_a_profile_of_it() -> None:
    origin = ImportMetadata(
        model="small",
        source="by hand",
        kind="V100",
        device_name="V100",
        memory_bytes=1,
        batch_size=10,
        sizes=(5, 10),
        optimizer="adam",
    )
    profile = import_profile(ONE_TIME, origin)
    assert profile.microbatch_sizes == (5, 10)
    assert [m.forward_ns for m in profile.at(5)] == [45_000, 0, 15_000]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("CONV|1x4x4|1x2x3x3|2x4x4", "line 4 is no layer of ParaDL's table: 'CONV|1x4x4|1x2x3x3|2x4x4'; want NAME|"),
        ("CONV|1x4x4|1x2x-3x3|2x4x4|0", "line 4: '1x2x-3x3' is not the size of the weights"),
        ("CONV|1x4x4|1x2x3x3|2.5|0", "line 4: '2.5' is not the size of the output"),
        ("CONV|1x4x4|1x2x3x3|2x4x4|soon", "line 4: 'soon' is not a valid time"),
        ("CONV|1x4x4|1x2x3x3|999999999x999999999x99|1", "line 4: the output 999999999x999999999x99 is too large"),
        ("CONV|1x4x4|1x2x3x3|2x4x4|9e9", "line 4: the time 9e9 is too large"),
    ],
)
def test_lines_that_are_no_layers(line: str, message: str) -> None:
    with pytest.raises(BapipeError, match=re.escape(message)):
        parse_paradl(f"{HEADER}{line}\n", 10)
