"""Writes the JSON Schemas beside this file: `python -m bapipe.formats.schemas`."""

from pathlib import Path

from bapipe.formats.codec import KINDS, schema

for kind in KINDS:
    (Path(__file__).parent / f"{kind.replace('/', '-')}.json").write_bytes(schema(kind))
