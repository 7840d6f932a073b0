"""The rails of a small residual block by hand, and the contents of a drawing."""

from msgspec.structs import replace

from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import DeviceKind, ModelProfile
from bapipe.report.layer_diagram import MAX_RAILS, bar, layer_rows
from tests.builders import chain


def _profile() -> ModelProfile:
    layers = {"a": (("x",), 4), "b": (("a",), 2), "c": (("a", "b"), 1), "<d>": (("c",), 0)}
    return ModelProfile(
        model="block",
        device=DeviceKind(kind="cpu", name="cpu", memory_bytes=1),
        dtype="float32",
        optimizer="sgd-momentum",
        layers=tuple(
            LayerProfile(
                name=name, kind="Linear", inputs=inputs, outputs=(name,), param_bytes=0, optimizer_state_bytes=0,
            )
            for name, (inputs, _) in layers.items()
        ),
        measurements=(
            Measurement(
                microbatch_size=1,
                layers=tuple(
                    LayerMeasurement(
                        forward_ns=3, input_grad_ns=2, weight_grad_ns=1, stash_bytes=0, output_bytes=(num_bytes,),
                    )
                    for _, num_bytes in layers.values()
                ),
            ),
        ),
    )  # fmt: skip


def test_a_tensor_keeps_its_rail_until_its_last_use() -> None:
    found = [(row.marks, row.rails, row.cut_bytes, row.num_tensors) for row in layer_rows(_profile())]
    assert found == [
        ("●", ("a",), 4, 1),
        ("├╮", ("a", "b"), 6, 2),
        ("●╯", ("c",), 1, 1),
        ("●", (), 0, 0),
    ]
    assert [row.forward_backward_ns for row in layer_rows(_profile())] == [6] * 4


def test_beyond_a_number_of_rails_tensors_count_and_are_not_drawn() -> None:
    """Every layer feeds the last one, as with very many skip connections."""
    num = 2000
    profile = chain([1] * num, output_bytes=2)
    last = replace(profile.layers[-1], inputs=tuple(layer.outputs[0] for layer in profile.layers[:-1]))
    inputs = [replace(layer, inputs=("x",)) for layer in profile.layers[:-1]]
    rows = layer_rows(replace(profile, layers=(*inputs, last)))
    assert [row.num_tensors for row in rows] == [*range(1, num), 0]
    assert [row.cut_bytes for row in rows] == [*range(2, 2 * num, 2), 0]
    assert rows[MAX_RAILS - 1].marks == "│" * (MAX_RAILS - 1) + "╮"
    assert [row.marks for row in rows[MAX_RAILS:-1]] == ["│" * MAX_RAILS + "…"] * (num - 1 - MAX_RAILS)
    assert rows[-1].marks == "●" + "╯" * (MAX_RAILS - 1)


def test_bars_are_in_eighths() -> None:
    assert [bar(value, 16, 2) for value in (0, 1, 4, 8, 15, 16)] == ["", "▏", "▌", "█", "█▉", "██"]
    assert bar(1, 10**9, 2) == "▏"
    assert bar(0, 0) == ""
