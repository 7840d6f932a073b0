"""What happens to a file that has the name of a command's output."""

import os
from pathlib import Path

import pytest
from msgspec import structs

from bapipe.cli import outputs
from bapipe.cli.outputs import write_output
from bapipe.formats.codec import encode
from bapipe.formats.profile import ModelProfile
from tests.builders import chain

BEFORE = chain([1, 2])
AFTER = structs.replace(BEFORE, model="another")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The remarks of a command."""
    told: list[str] = []
    monkeypatch.setattr(outputs, "note", told.append)
    return told


def write_private(path: Path, profile: ModelProfile) -> None:
    path.write_bytes(encode(profile))
    path.chmod(0o600)


def mode_of(path: Path) -> int:
    return path.lstat().st_mode & 0o777


def test_a_private_file_and_its_copy_stay_private(tmp_path: Path, notes: list[str]) -> None:
    path, kept = tmp_path / "profile.json", tmp_path / "profile.json~"
    write_private(path, BEFORE)
    write_output(path, BEFORE)
    assert (notes, kept.exists()) == ([], False)
    write_output(path, AFTER)
    assert (path.read_bytes(), kept.read_bytes()) == (encode(AFTER), encode(BEFORE))
    assert (mode_of(path), mode_of(kept)) == (0o600, 0o600)
    assert notes == [f"{path} was there already, with another content: it is kept as {kept}"]


def test_a_copy_replaces_a_link_of_its_name_and_leaves_what_that_points_to(tmp_path: Path, notes: list[str]) -> None:
    path, kept, other = tmp_path / "profile.json", tmp_path / "profile.json~", tmp_path / "other"
    other.write_bytes(b"other")
    kept.symlink_to(other)
    write_private(path, BEFORE)
    write_output(path, AFTER)
    assert other.read_bytes() == b"other"
    assert not kept.is_symlink()
    assert (kept.read_bytes(), mode_of(kept)) == (encode(BEFORE), 0o600)


def test_the_copy_of_what_a_link_points_to_is_beside_that(tmp_path: Path, notes: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    link, path = tmp_path / "link.json", tmp_path / "folder" / "profile.json"
    link.symlink_to(Path("folder") / "profile.json")
    write_private(path, BEFORE)
    write_output(link, AFTER)
    kept = path.with_name("profile.json~")
    assert (path.read_bytes(), kept.read_bytes()) == (encode(AFTER), encode(BEFORE))
    assert os.readlink(link) == "folder/profile.json"
    assert notes == [f"{link} was there already, with another content: it is kept as {kept}"]
