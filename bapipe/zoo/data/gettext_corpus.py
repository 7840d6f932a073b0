"""Sentences and their translations from the message catalogues of the programs on this machine."""

import gettext
import struct
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/usr/share/locale")
"""The folder of message catalogues on Linux, with one subfolder per language."""

_MIN_WORDS = 5
_CONTEXT_END = "\4"
"""Separates the context of a message, if it has one, from the message."""


def catalogue_pairs(language: str, root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yields messages of five words or more in English and in another language, each on a line.

    Messages that have plurals are left out, and so are catalogues that are not in UTF-8.
    """
    seen: set[str] = set()
    for path in sorted(root.glob(f"{language}/LC_MESSAGES/*.mo")):
        for english, other in _messages(path):
            if len(english.split()) >= _MIN_WORDS and english not in seen:
                seen.add(english)
                yield " ".join(english.split()), " ".join(other.split())


def _messages(path: Path) -> list[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)
        charset = catalogue.charset() or "ascii"
        # Many catalogues declare another character set although their messages are in UTF-8.
        texts = [
            (key.encode(charset).decode(), text.encode(charset).decode())
            for key, text in catalogue._catalog.items()  # type: ignore[attr-defined]
            if isinstance(key, str)  # keys of messages with plurals are pairs
        ]
    except (OSError, struct.error, ValueError, LookupError):  # not a catalogue, or not in UTF-8
        return []
    return [(key.rpartition(_CONTEXT_END)[2], text) for key, text in texts]
