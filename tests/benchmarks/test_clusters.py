"""Predictions of published runs, on a folder of made-up files in the published format, by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bapipe.errors import BapipeError
from benchmarks.clusters.__main__ import compare
from benchmarks.clusters.deepspeed import predict
from benchmarks.clusters.links import slower_links
from benchmarks.clusters.runs import Run, left_out, read_runs, with_missing_layer
from benchmarks.clusters.sailor_files import SailorFiles

NUM_LAYERS, SHARE, PARAMS = 6, 10_000, 8_000_000
FORWARD, BACKWARD, UPDATE = 3_000_000, 5_000_000, 4_000_000
BETWEEN = 92_551_901_044 // 4
"""Bytes per second between a member and its partner, if four members of a host of GH-96 send."""

WITHIN = 250 * 10**9 // 2
"""Bytes per second from a member to the next."""


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def rows(num_layers: int, forward: float = 3e-3) -> dict[str, list[float]]:
    return {str(index): [forward, 5e-3, 4e-3] for index in range(num_layers)}


def layers(num_layers: int) -> dict[str, dict[str, int]]:
    row = {"params_bytes": PARAMS, "act_output_bytes": 4 * SHARE, "act_mem_bytes": 1}
    return {str(index): row for index in range(num_layers)}


def plan(stages: Sequence[Sequence[int]], num_replicas: int, mbs: int, gbs: int, real: float) -> dict[str, Any]:
    host = [[["GH-96", 4, "zone"]], 4]
    pipeline = {
        "num_stages": len(stages),
        "layers_per_stage": stages,
        "tmp_per_stage": [[host] * num_replicas for _ in stages],
        "dp": [num_replicas] * len(stages),
    }
    return {"pipeline_list": [pipeline], "mbs": mbs, "gbs": gbs, "real": real, "N": len(stages) * num_replicas}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "llm_info.json", {m: {"1": layers(n), "4": layers(n)} for m, n in MODELS.items()})
    own = {"1": {"4": rows(NUM_LAYERS, 9e-3)}, "2": {"4": rows(NUM_LAYERS)}, "4": {"4": rows(NUM_LAYERS, 6e-3)}}
    for model in MODELS:  # that of GPT-Neo is a copy
        write(tmp_path / "profiles" / model / "GH-96" / "profile.json", own)
    table = {"optimizer_time_ms": 32.0, "layer_compute_total_ms": [9.0] * 8}
    write(tmp_path / "Metis/profiles/GPT-Neo-2.7/GH-96/mbs2_tmp4.json", {"execution_time": table})
    write(tmp_path / "providers" / "intra_node_bandwidths.json", {"GH-96": {"4": [[1.0, 2.0], 250e9]}})
    runs = tmp_path / "validation" / "clariden"
    write(runs / "OPT-350/N2/plan_config_N2_D2.json", plan([range_of(0, 6)], 2, 2, 8, 0.1))
    write(runs / "OPT-350/N2/plan_config_N2_D1.json", plan([range_of(0, 3), range_of(3, 6)], 1, 2, 8, 0.2))
    write(runs / "OPT-350/N4/plan_config_N4_D4.json", plan([range_of(0, 6)], 4, 2, 8, 0.1))
    write(runs / "OPT-350/N1/plan_config_N1_D1.json", plan([range_of(0, 6)], 1, 1, 8, 0.3))
    write(runs / "GPT-NEO/N2/plan_config_N2_D1.json", plan([[0, 1, 2, 6], [4, 5, 6, 7]], 1, 2, 4, 0.4))
    write(runs / "GPT-NEO/N1/plan_config_N1_D1.json", plan([range_of(0, 6)], 1, 2, 4, 0.5))
    return tmp_path


MODELS = {"OPT-350": NUM_LAYERS, "GPT-Neo-2.7": 8}


def range_of(begin: int, end: int) -> list[int]:
    return list(range(begin, end))


def by_name(folder: Path) -> tuple[SailorFiles, dict[str, Run]]:
    files = SailorFiles(folder)
    return files, {run.name.removeprefix("clariden/"): run for run in read_runs(files)}


def seconds(num_bytes: int, bytes_per_s: int) -> int:
    return -(-num_bytes * 10**9 // bytes_per_s)


def test_data_parallelism_by_hand(folder: Path) -> None:
    files, runs = by_name(folder)
    step = predict(runs["OPT-350/N2/N2_D2"], files)
    assert step.pipeline_ns == 2 * NUM_LAYERS * (FORWARD + BACKWARD)  # two micro-batches for each replica
    # A ring of two sends two halves. The update is of 4 layers, for 6 layers.
    ring_ns = 2 * seconds(NUM_LAYERS * PARAMS // 2, BETWEEN)
    assert step.sum_and_update_ns == ring_ns + UPDATE // 4 * NUM_LAYERS


def test_two_stages_by_hand(folder: Path) -> None:
    files, runs = by_name(folder)
    transfer_ns, gather_ns = seconds(2 * SHARE, BETWEEN), 3 * seconds(2 * SHARE, WITHIN)
    step = predict(runs["OPT-350/N2/N2_D1"], files)
    forward_ns, backward_ns = 3 * FORWARD, 3 * BACKWARD
    # F0, then four times (transfer, gather, F1, B1, transfer); the first stage's F and B run meanwhile, except the
    # first F and the last B.
    first_ns, last_ns = forward_ns, backward_ns + gather_ns
    turn_ns = gather_ns + forward_ns + backward_ns + 2 * transfer_ns
    assert first_ns + 4 * turn_ns + last_ns <= step.pipeline_ns <= first_ns + 4 * turn_ns + last_ns + 4 * gather_ns
    assert step.sum_and_update_ns == UPDATE // 4 * 3


def test_which_runs_are_left_out_and_why(folder: Path) -> None:
    files, runs = by_name(folder)
    reasons = {name.removeprefix("clariden/"): why for name, why in left_out(list(runs.values()), files).items()}
    assert reasons == {
        "OPT-350/N1/N1_D1": "the profile of 4 GH-96 is slower at micro-batches of 1 than of 2",
        "OPT-350/N2/N2_D2": "0.1 s is also what clariden/OPT-350/N4/N4_D4 has, on other devices",
        "OPT-350/N4/N4_D4": "0.1 s is also what clariden/OPT-350/N2/N2_D2 has, on other devices",
        "GPT-NEO/N1/N1_D1": "its plan has layers 0 to 5, as OPT-350 has; GPT-Neo-2.7 has 8",
    }
    assert runs["GPT-NEO/N2/N2_D1"].stages == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert runs["GPT-NEO/N2/N2_D1"].notes == ("layer 6 stands in the place of layer 3",)


def test_a_copy_of_another_models_times_is_not_used(folder: Path) -> None:
    files, _ = by_name(folder)
    times, said = files.times("GPT-Neo-2.7", "GH-96")
    assert said == "GPT-Neo-2.7 on GH-96: table for Metis; its own file is a copy of that of OPT-350"
    assert times[2, 4].forward_ns == (3_000_000,) * 8
    assert files.times("OPT-350", "GH-96")[1] == ""


def test_layers_are_put_right_only_if_one_is_missing() -> None:
    assert with_missing_layer([[0, 1], [3, 3]], 4) == (((0, 1), (2, 3)), ("layer 3 stands in the place of layer 2",))
    assert with_missing_layer([[0, 1], [2, 3]], 4) == (((0, 1), (2, 3)), ())
    assert with_missing_layer([[1, 0], [2, 3]], 4) == (((1, 0), (2, 3)), ())
    assert with_missing_layer([[0, 1], [2]], 4) == (((0, 1), (2,)), ())


def test_the_slower_host_decides() -> None:
    links = {(a.source, a.target): a.bytes_per_s for a in slower_links({"a": ("RTX-3090", 8), "b": ("Titan-RTX", 8)})}
    assert links == dict.fromkeys([("a", "b"), ("b", "a")], 114_876_125 // 8)
    assert slower_links({"a": ("GH-96", 4), "b": ("GH-96", 4)}) == ()


def test_the_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(SailorFiles(folder))
    printed = capsys.readouterr().out
    for text in (
        "OPT-350, GH200",
        "OPT-350/N2/N2_D1",
        "left out",
        "sets in the right order",
        "a copy of that of OPT-350",
    ):
        assert text in printed


def test_a_folder_without_the_data(tmp_path: Path) -> None:
    with pytest.raises(
        BapipeError, match=r"llm_info.json: no such file; want a checkout of github.com/eth-easl/sailor"
    ):
        SailorFiles(tmp_path)
