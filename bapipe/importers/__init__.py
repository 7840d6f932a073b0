"""Imports profiles that other tools measured, as profile/1.

A parser for each format (`pipedream`, `paradl`, `table`) returns a tuple of `ImportedLayer`. `to_profile` makes a
profile of these and of an `ImportMetadata`, the facts that the file does not contain. `sailor` has profiles of groups
of devices.
"""

from pathlib import Path

from bapipe.errors import BapipeError
from bapipe.formats.codec import decode_as, encode
from bapipe.formats.files import read_text
from bapipe.formats.profile import ModelProfile
from bapipe.importers.metadata import NUM_OPTIMIZER_STATES, ImportMetadata
from bapipe.importers.paradl import is_paradl, parse_paradl
from bapipe.importers.pipedream import is_pipedream, parse_pipedream
from bapipe.importers.sailor import import_group
from bapipe.importers.table import parse_table
from bapipe.importers.to_profile import ImportedLayer, to_profile

__all__ = ["NUM_OPTIMIZER_STATES", "ImportMetadata", "import_file", "import_group", "import_profile"]


MAX_LINES = 50_000
"""Most lines of a file; a profile of as many layers has 20 MiB."""


def import_profile(text: str, metadata: ImportMetadata) -> ModelProfile:
    """Returns the profile in the text of a file: PipeDream's graph.txt, ParaDL's table, or one with a header.

    Raises:
        BapipeError: a line does not have the format; the error has its number.
    """
    if text.count("\n") > MAX_LINES:
        raise BapipeError(f"more than {MAX_LINES:,} lines; want the layers of one model")
    layers = _parse(text, metadata.batch_size)
    if not layers:
        raise BapipeError("no layer in the file: want PipeDream's graph.txt, or a table with a header")
    profile = to_profile(layers, metadata)
    return decode_as(encode(profile), ModelProfile)  # refuses what a profile cannot hold, before it is written


def _parse(text: str, batch_size: int) -> tuple[ImportedLayer, ...]:
    if is_paradl(text):
        return parse_paradl(text, batch_size)
    return parse_pipedream(text) if is_pipedream(text) else parse_table(text)


def import_file(path: Path, metadata: ImportMetadata) -> ModelProfile:
    """Returns the profile in a file; errors begin with its path."""
    text = read_text(path)
    try:
        return import_profile(text, metadata)
    except BapipeError as error:
        raise BapipeError(f"{path}: {error}") from None
