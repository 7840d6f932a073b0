"""Profiles that others measured, as profile/1."""

from collections.abc import Callable
from pathlib import Path

from bapipe.errors import BapipeError
from bapipe.formats.codec import read_text
from bapipe.formats.profile import ModelProfile
from bapipe.importers.metadata import NUM_OPTIMIZER_STATES, Origin
from bapipe.importers.pipedream import is_pipedream, pipedream_layers
from bapipe.importers.table import table_layers
from bapipe.importers.to_profile import ImportedLayer, profile_of

__all__ = ["NUM_OPTIMIZER_STATES", "Origin", "import_file", "import_profile"]


def import_profile(text: str, origin: Origin) -> ModelProfile:
    """Returns the profile that a foreign file holds: PipeDream's graph.txt, or a table with a row for each layer.

    Raises:
        BapipeError: a line that is neither, with its number.
    """
    parse: Callable[[str], tuple[ImportedLayer, ...]] = pipedream_layers if is_pipedream(text) else table_layers
    layers = parse(text)
    if not layers:
        raise BapipeError("no layer in the file: want PipeDream's graph.txt, or a table with a header")
    return profile_of(layers, origin)


def import_file(path: Path, origin: Origin) -> ModelProfile:
    """Returns what `import_profile` makes of the file at `path`; errors begin with the path."""
    text = read_text(path)
    try:
        return import_profile(text, origin)
    except BapipeError as error:
        raise BapipeError(f"{path}: {error}") from None
