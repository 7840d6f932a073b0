"""What happens to a file that has the name of a command's output."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from bapipe.cli import outputs, run
from bapipe.cli.outputs import check_output, write_output, write_output_bytes
from bapipe.errors import BapipeError
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


def test_pages_and_traces_keep_what_they_replace_and_an_older_copy_is_not_lost_unsaid(
    tmp_path: Path, notes: list[str]
) -> None:
    path, kept = tmp_path / "page.html", tmp_path / "page.html~"
    for content in (b"1", b"1", b"2", b"3"):
        write_output_bytes(path, content)
    assert (path.read_bytes(), kept.read_bytes()) == (b"3", b"2")
    first = f"{path} was there already, with another content: it is kept as {kept}"
    assert notes == [first, f"{first}, in place of the older file of that name"]


def test_an_input_is_no_output_by_whatever_name(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.write_bytes(b"plan")
    link.symlink_to(path)
    check_output(tmp_path / "new.json", path, link)
    check_output(path, tmp_path / "none.json")
    for output in (path, link, tmp_path / "." / "plan.json"):
        with pytest.raises(BapipeError, match=rf"^{re.escape(str(output))} would be overwritten, and is an input of"):
            check_output(output, tmp_path / "none.json", path)


def test_the_copy_of_an_output_takes_no_place_of_an_input(tmp_path: Path) -> None:
    path, link, kept = tmp_path / "plan.json", tmp_path / "link.json", tmp_path / "plan.json~"
    link.symlink_to(path)
    kept.write_bytes(b"an older plan")
    check_output(path, kept)  # nothing is there to be kept
    path.write_bytes(b"plan")
    for output in (path, link):
        with pytest.raises(
            BapipeError, match=rf"^{re.escape(f'{kept} would be overwritten by a copy of {output}, and')}"
        ):
            check_output(output, tmp_path / "none.json", kept)


def test_exported_weights_keep_what_they_replace(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported(checkpoint: Path, output: Path, place: Callable[[Path, Path], None]) -> int:
        (tmp_path / "finished").write_bytes(b"new")
        place(output, tmp_path / "finished")
        return 1

    monkeypatch.setattr(run, "export_checkpoint", exported)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    run.export(tmp_path, output=path)
    assert (path.read_bytes(), path.with_name("model.safetensors~").read_bytes()) == (b"new", b"old")
