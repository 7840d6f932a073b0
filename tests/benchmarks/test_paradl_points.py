"""ParaDL's points, on made-up files in its format, by hand."""

import json
from pathlib import Path

import pytest

from bapipe.errors import BapipeError
from benchmarks.clusters.paradl import NETWORKS, measured_step_s, paradl_table, points

VGG = NETWORKS[0]
TABLE = "Dataset|D\nInput|1x1\nModel|VGG\nFC|1x1|1000x1000x1x1|1x1|0.001\n"
"""One layer: 4 MB of weights, and 1 ms for forward and backward of a sample."""

PROJECTION = "name\tB\tp\nsingle 32 1 9 9 0 9 1\ndata\t256.0\t8.0\t1.0\t1.0\t1.0\t200.0\t5.0\n"


def log(path: Path, *epochs: tuple[int, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"iteration": i, "elapsed_time": s, "epoch": 1} for i, s in epochs]))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    logs, analysis = tmp_path / "logs", tmp_path / "analysis"
    for name in ("model", "log"):
        (analysis / name).mkdir(parents=True)
    for network in NETWORKS:
        (analysis / "model" / network.table).write_text(TABLE)
        (analysis / "log" / f"data_{network.folder}_scaling_proj.log").write_text(PROJECTION)
    runs = logs / "data" / "results" / "vgg" / "8"
    log(runs / "2020-01-21-10.log", (10, 900.0), (20, 910.0))  # an older one
    log(runs / "2020-01-22-10.log", (10, 9.0), (20, 9.4), (30, 12.4), (40, 12.8))
    log(runs / "2020-01-23-10.log", (10, 1.0))
    return logs, analysis


def test_a_point_by_hand(folders: tuple[Path, Path]) -> None:
    (point,) = points(VGG, *folders)
    assert point.num_devices == 8
    assert point.measured_s == pytest.approx(0.04)  # the median of 0.4, 3 and 0.4 s for ten iterations
    assert point.projected_s == pytest.approx(200 / 5000)  # 1.28 million samples, 256 a step
    # 32 ms of compute; a ring of eight: 14 messages of 0.5 MB at 12.5 GB/s, and 500 ns each.
    assert point.predicted_s == pytest.approx(0.032 + 14 * (0.5e6 / 12.5e9 + 500e-9), abs=1e-9)
    assert point.accuracy(0.03) == pytest.approx(0.75)


def test_a_folder_without_logs_of_several_epochs(folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert measured_step_s(tmp_path / "nothing") is None
    with pytest.raises(BapipeError, match="no log of data parallelism with two epochs"):
        paradl_table(tmp_path / "nothing", folders[1])
    assert paradl_table(*folders).row_count == 3  # a point, the mean of its network, and of all
