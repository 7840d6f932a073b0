"""JSON that others wrote: every limit, what is refused although parsers accept it, and files that never end."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from bapipe.cli.options import key_values
from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats import files, strict_json
from bapipe.formats.files import read_limited
from bapipe.formats.strict_json import decode_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 65 + b"]" * 65, "lists and objects are nested more than 64 deep - at `$`"),
        (b'{"a":' * 10**6, "lists and objects are nested more than 64 deep - at `$`"),
        (b"1" * 5000, "the number 11111111111111111111... has more than 100 digits - at `$`"),
        (b"1e400", "Number out of range - at `$`"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b' occurs twice in one object - at `$`"),
        (b"[" + b"[]," * 2**20 + b"[]]", "more than 2,097,152 values - at `$`"),
        (b'{"a": "\xff"}', "not text in UTF-8: byte 0xff at position 7, line 1 - at `$`"),
        (b'{"a": 1,\n "b": "M\xe4rz"}', "not text in UTF-8: byte 0xe4 at position 17, line 2 - at `$`"),
        (b'{"a": NaN}', "not JSON: JSON is malformed: invalid character (byte 6) - at `$`"),
        (b'"\\ud800"', "not JSON: Input data was truncated - at `$`"),
        ('{"a": 1}'.encode("utf-16"), "not JSON: JSON is malformed: invalid character (byte 0) - at `$`"),
        (b'\xef\xbb\xbf{"a": 1}', "begins with a byte-order mark: save it as UTF-8 without one - at `$`"),
        (b"", "not JSON: Input data was truncated - at `$`"),
    ],
)
def test_what_is_beyond_a_limit_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        decode_json(text, Any)
    assert str(caught.value) == message


def test_text_in_strings_does_not_count() -> None:
    text = '["' + "[" * 1000 + '", "' + "1" * 1000 + r'\"[[", "\\", {"[[[": "{{{"}]'
    assert decode_json(text.encode(), Any)[3] == {"[[[": "{{{"}


def test_what_a_type_leaves_out_is_checked_too() -> None:
    with pytest.raises(InvalidFile, match="the key 'x' occurs twice"):
        decode_json(b'{"a": 1, "more": {"x": 1, "x": 2}}', dict[str, Any])


def test_a_text_larger_than_the_limit_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MAX_BYTES", 10)
    with pytest.raises(InvalidFile, match="11 bytes; want at most 10"):
        decode_json(b" " * 10 + b"1", Any)


def test_a_file_that_never_ends_is_not_read_to_its_end() -> None:
    with pytest.raises(BapipeError, match=r"^/dev/zero: larger than 24 MiB, the most that is read$"):
        read_limited(Path("/dev/zero"))


def test_a_pipe_is_read_if_somebody_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"1" * 100_000,))
    writer.start()
    assert read_limited(pipe) == b"1" * 100_000
    writer.join()
    monkeypatch.setattr(files, "PIPE_S", 0.01)
    with pytest.raises(
        BapipeError, match=r"pipe: nothing was written to this pipe for 0\.01 s: start first what writes"
    ):
        read_limited(pipe)


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000, "/proc/self/mem", "/"])
def test_a_path_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(BapipeError, match=f"^{path[:100]}.*: cannot be read: "):
        read_limited(Path(path))


def test_a_model_argument_is_json_or_text() -> None:
    given = ["a=[1, 2]", "b=x,y", "c=NaN", "d={1", "e="]
    assert key_values(given) == {"a": [1, 2], "b": "x,y", "c": "NaN", "d": "{1", "e": ""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=" + "[" * 10**5, "--arg a: lists and objects are nested more than 64 deep"),
        ("a=" + "1" * 5000, "--arg a: the number 11111111111111111111... has more than 100 digits"),
        ('a={"b": 1, "b": 2}', "--arg a: the key 'b' occurs twice in one object"),
        ("a=1e400", "--arg a: Number out of range"),
        ("a=\udcff", "--arg a: not text in UTF-8"),
    ],
)
def test_a_model_argument_beyond_a_limit_is_refused(text: str, message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        key_values([text])
    assert str(caught.value) == message
