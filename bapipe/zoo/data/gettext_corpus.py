"""Sentences and their translations from the message catalogues of the programs on this machine."""

import struct
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/usr/share/locale")
"""Where programs on Linux keep their catalogues, in a folder for each language."""

_MAGIC = 0x950412DE
_MIN_WORDS = 5


def catalogue_pairs(language: str, root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yields messages of five words or more in English and in another language, each on a line.

    Messages that have plurals are left out, and so are catalogues that are not in UTF-8.
    """
    seen: set[str] = set()
    for path in sorted(root.glob(f"{language}/LC_MESSAGES/*.mo")):
        try:
            messages = list(_messages(path.read_bytes()))
        except (OSError, struct.error, UnicodeDecodeError):
            continue
        for english, other in messages:
            if "\0" not in english and len(english.split()) >= _MIN_WORDS and english not in seen:
                seen.add(english)
                yield " ".join(english.split()), " ".join(other.split())


def _messages(content: bytes) -> Iterator[tuple[str, str]]:
    """The format of GNU gettext: a table of lengths and places for the messages, and one for their translations."""
    order = "<" if struct.unpack_from("<I", content)[0] == _MAGIC else ">"
    _, _, count, messages, translations = struct.unpack_from(f"{order}5I", content)

    def text(table: int, index: int) -> str:
        length, start = struct.unpack_from(f"{order}2I", content, table + 8 * index)
        return content[start : start + length].decode()

    for index in range(count):
        yield text(messages, index).rpartition("\4")[2], text(translations, index)  # what is before \4 is context
