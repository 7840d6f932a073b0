"""The JSON Schema of each kind of file, made from its type and the docstrings of that."""

import inspect
import re
from typing import Any

import msgspec

from bapipe.formats.codec import KINDS


def schema(kind: str) -> bytes:
    """Returns the JSON Schema of a file kind, such as `plan/1`."""
    body = msgspec.json.schema(KINDS[kind])
    for definition in body["$defs"].values():
        _describe(definition)
    return (
        msgspec.json.format(
            msgspec.json.encode({"$schema": "https://json-schema.org/draft/2020-12/schema"} | body), indent=1
        )
        + b"\n"
    )


def _describe(definition: dict[str, Any]) -> None:
    """Replaces a docstring by its summary, and moves its descriptions of attributes to their properties, in place."""
    text = inspect.cleandoc(definition.get("description", ""))
    summary, _, sections = text.partition("\n\nAttributes:\n")
    attributes = sections.partition("\n\nRaises:\n")[0]
    definition["description"] = " ".join(summary.partition("\n\nRaises:\n")[0].split())
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", attributes, flags=re.MULTILINE)
    for names, description in entries:
        for name in names.split(", "):
            sentence = " ".join(description.split())
            definition["properties"][name]["description"] = sentence[:1].upper() + sentence[1:]
