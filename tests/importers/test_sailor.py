"""Sailor's profiles, in files of its format that are worked out by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bapipe.cli import app
from bapipe.errors import BapipeError
from bapipe.formats.codec import read
from bapipe.formats.profile import ModelProfile
from bapipe.importers import ImportMetadata
from bapipe.importers.sailor import group_profile, import_group, parse_metis_table, parse_models, parse_times

META = ImportMetadata(
    model="small",
    source="by hand",
    kind="GPU",
    device_name="GPU",
    memory_bytes=100,
    batch_size=1,
    sizes=(),
    optimizer="adamw",
)


def layer(params: int, output: int = 6, stash: int = 50) -> dict[str, int]:
    return {"params_bytes": params, "act_output_bytes": output, "act_mem_bytes": stash, "act_input_bytes": 1}


def numbered(rows: list[Any]) -> dict[str, Any]:
    return {str(index): row for index, row in enumerate(rows)}


MODELS = {
    "small": {"1": numbered([layer(80), layer(20), layer(20), layer(20), layer(40)])}
    | {"2": numbered([layer(40), layer(10), layer(10), layer(10), layer(20, output=7)])},
    "other": {"1": numbered([layer(1)] * 4)},
}
ROWS = numbered([[1e-6, 2e-6, 8e-6], [9e-6, 9e-6, 8e-6], [3e-6, 5e-6, 8e-6], [3e-6, 5e-6, 8e-6], [4e-6, 6e-6, 8e-6]])
TIMES = {"1": {"2": ROWS}, "4": {"1": ROWS, "2": ROWS}}
METIS = {
    "model": {"num_layers": 5},
    "execution_time": {"optimizer_time_ms": 0.040, "layer_compute_total_ms": [0.003, 0.018, 0.009, 0.009, 0.012]},
}


def as_bytes(value: object) -> bytes:
    return json.dumps(value).encode()


def small(members: int, **changes: Any) -> ModelProfile:
    return group_profile(
        parse_times(as_bytes(TIMES)), parse_models(as_bytes(MODELS)), replace(META, **changes), members
    )


def test_a_group_of_two() -> None:
    profile = small(2)
    assert (profile.device.kind, profile.dtype, profile.microbatch_sizes) == ("GPUx2", "float32", (1, 4))
    assert (profile.device.members, profile.device.split) == (2, "tensor")
    assert [a.name for a in profile.layers] == ["layer0", "layer1", "layer2", "layer3", "layer4"]
    assert [a.kind for a in profile.layers] == ["embedding", "block", "block", "block", "head"]
    assert [a.inputs for a in profile.layers] == [("tokens",), ("layer0",), ("layer1",), ("layer2",), ("layer3",)]
    assert [a.param_bytes for a in profile.layers] == [40, 10, 10, 10, 20]
    assert [a.optimizer_state_bytes for a in profile.layers] == [80, 20, 20, 20, 40]
    # 8 us are the update of an embedding, two blocks and a head: 40 + 10 + 10 + 20 = 80 bytes.
    assert [a.update_ns for a in profile.layers] == [4000, 1000, 1000, 1000, 2000]
    measured = profile.at(4)
    # The first block has the times of the second one.
    assert [m.forward_ns for m in measured] == [1000, 3000, 3000, 3000, 4000]
    assert [m.input_grad_ns for m in measured] == [0, 2500, 2500, 2500, 3000]
    assert [m.weight_grad_ns for m in measured] == [2000, 2500, 2500, 2500, 3000]
    assert [m.stash_bytes for m in measured] == [200] * 5
    assert [m.output_bytes for m in measured] == [(12,)] * 4 + [(14,)]  # a member sends its half of 4 samples
    assert [m.output_bytes for m in profile.at(1)] == [(3,)] * 4 + [(4,)]  # half of 7, rounded up


def test_a_single_device_and_chosen_sizes() -> None:
    profile = small(1)
    assert (profile.device.kind, profile.device.num_members, profile.microbatch_sizes) == ("GPU", 1, (4,))
    assert [a.param_bytes for a in profile.layers] == [80, 20, 20, 20, 40]
    assert small(2, sizes=(4,)).microbatch_sizes == (4,)


def test_a_table_for_metis_has_forward_and_backward_together() -> None:
    found = parse_metis_table(as_bytes(METIS))
    assert found.forward_ns == (1000, 3000, 3000, 3000, 4000)
    assert found.backward_ns == (2000, 6000, 6000, 6000, 8000)
    assert found.update_ns == 8000  # of five rows with the same update, the sum


@pytest.mark.parametrize(
    ("members", "changes", "message"),
    [
        (3, {}, "the layers of small are not those of 3 members; want 1, 2"),
        (1, {"sizes": (2,)}, "no times for micro-batches of 2 and 1 members; want 4"),
        (1, {"model": "large"}, "the layers hold no model 'large'; want one of other, small"),
        (1, {"optimizer": "lion"}, "unknown optimizer 'lion'"),
        (1, {"model": "other"}, "are those of 5 layers, as small has; other has 4: the file is not of this model"),
    ],
)
def test_what_the_files_do_not_hold(members: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError) as raised:
        small(members, **changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_times, {"4": {"1": {"0": [1, 2]}}}, "$"),
        (parse_times, {"4": {"1": {"0": [1, -2, 3]}}}, "$"),
        (parse_times, {"4": {"1": {"0": [1, 2e7, 3]}}}, "$"),
        (parse_times, {"0": {"1": ROWS}}, "'0' is not a number of samples"),
        (parse_times, {"4": {"x": ROWS}}, "'x' is not a number of members"),
        (parse_times, {"4": {"1": {"1": [1, 2, 3]}}}, "1 layers without layer 0"),
        (parse_models, {"small": {"1": {"0": {"params_bytes": 1}}}}, "act_output_bytes"),
        (parse_models, {"small": {"1": {"0": layer(2**41)}}}, "params_bytes"),
        (parse_metis_table, {"execution_time": {"optimizer_time_ms": 1}}, "layer_compute_total_ms"),
    ],
)
def test_files_of_another_kind(parse: Callable[[bytes], object], value: object, message: str) -> None:
    with pytest.raises(BapipeError) as raised:
        parse(as_bytes(value))
    assert message in str(raised.value)


def test_errors_name_the_file(tmp_path: Path) -> None:
    models, times, empty = tmp_path / "llm_info.json", tmp_path / "profile.json", tmp_path / "empty"
    models.write_bytes(as_bytes(MODELS))
    times.write_bytes(as_bytes({"4": {"x": ROWS}}))
    empty.mkdir()
    for path, message in ((times, "'x' is not a number of members"), (empty, "want files such as mbs8_tmp4.json")):
        with pytest.raises(BapipeError) as raised:
            import_group(path, models, META, 1)
        assert str(raised.value).startswith(f"{path}: ")
        assert message in str(raised.value)


def test_the_command(tmp_path: Path) -> None:
    models, tables, output = tmp_path / "llm_info.json", tmp_path / "tables", tmp_path / "profile.json"
    models.write_bytes(as_bytes(MODELS))
    tables.mkdir()
    (tables / "mbs8_tmp2.json").write_bytes(as_bytes(METIS))
    (tables / "notes.txt").write_text("not a table")
    command = ["import", str(tables), "--model", "small", "--device", "GPU", "--output", str(output)]
    done = CliRunner().invoke(app, [*command, "--layers", str(models), "--members", "2", "--optimizer", "adam"])
    assert done.exit_code == 0, done.output
    profile = read(output, ModelProfile)
    assert (profile.device.kind, profile.microbatch_sizes, profile.model) == ("GPUx2", (8,), "small")
    for wrong, message in (
        ([], "want --batch-size (PipeDream's graph.txt or a table), or --layers (a profile of Sailor)"),
        (
            ["--layers", str(models), "--batch-size", "8"],
            "--batch-size does not go with --layers: a profile of Sailor says its sizes; leave it out",
        ),
        (["--batch-size", "8", "--members", "2"], "--members is for a profile of Sailor: add --layers llm_info.json"),
    ):
        failed = CliRunner().invoke(app, [*command, *wrong])
        assert isinstance(failed.exception, BapipeError)
        assert str(failed.exception) == message
