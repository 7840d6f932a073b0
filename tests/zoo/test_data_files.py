"""Files of data that never end, do not fit into memory, or are programs are refused."""

import os
from pathlib import Path

import pytest
from PIL import Image

from bapipe.errors import BapipeError
from bapipe.zoo.data.image_io import read_image
from bapipe.zoo.data.language_modeling import next_token_texts
from bapipe.zoo.data.translation import translations

ENDLESS = r"/(text\.txt|source\.txt|zero): a device or a pipe, which may never end; want a file$"


def test_a_file_that_never_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "source.txt")
    for spec in ("/dev/zero", str(tmp_path / "text.txt")):
        with pytest.raises(BapipeError, match=ENDLESS):
            next_token_texts(spec, vocabulary_size=300, length=8)
    with pytest.raises(BapipeError, match=ENDLESS):
        translations(str(tmp_path), vocabulary_size=60, source_length=9, target_length=9)


def test_a_file_larger_than_memory_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(2**43)  # without blocks on the disk
    with pytest.raises(
        BapipeError, match=r"/large\.txt: 8192\.0 GiB; want at most \S+ GiB, a quarter of this machine's memory$"
    ):
        next_token_texts(str(tmp_path), vocabulary_size=300, length=8)


def test_a_program_under_the_name_of_an_image_is_not_run(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "x.png")
    with pytest.raises(BapipeError, match=r"x\.png: cannot be read as an image: cannot identify image file"):
        read_image(tmp_path / "x.png", 8)
