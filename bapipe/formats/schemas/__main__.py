"""Writes the JSON Schemas into this file's folder: `python -m bapipe.formats.schemas`."""

from pathlib import Path

from bapipe.formats.codec import KINDS
from bapipe.formats.json_schema import schema

for kind in KINDS:
    (Path(__file__).parent / f"{kind.replace('/', '-')}.json").write_bytes(schema(kind))
