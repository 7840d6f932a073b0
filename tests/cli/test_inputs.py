"""What the command line makes of files of profiles and clusters."""

from pathlib import Path
from random import Random

import pytest
from msgspec import structs

from bapipe.cli import inputs
from bapipe.formats.codec import write
from bapipe.formats.profile import DeviceKind
from bapipe.planner.link_catalogue import cluster_like
from tests.random_profiles import random_profile


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("NVIDIA H200", []),
        (
            "V100",
            [
                "the profile was measured on V100, and the cluster has NVIDIA H200: times hold for the former only; "
                "profile there, or give those devices a `speed`"
            ],
        ),
    ],
)
def test_a_profile_of_another_gpu_is_noted(
    name: str, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(inputs, "note", told.append)
    of_h200 = structs.replace(
        random_profile(Random(1), 3), device=DeviceKind(kind="cuda", name="NVIDIA H200", memory_bytes=2**36)
    )
    write(tmp_path / "cluster.json", cluster_like(of_h200, 2))
    profile = structs.replace(of_h200, device=structs.replace(of_h200.device, name=name))
    cluster = inputs.read_or_assume_cluster({"cuda": profile}, tmp_path / "cluster.json", None)
    assert [device.model for device in cluster.devices] == ["NVIDIA H200"] * 2
    assert told == notes
