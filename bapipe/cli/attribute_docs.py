"""The help of options that a dataclass documents: its docstring is the only place that describes them."""

import re
from dataclasses import fields
from inspect import cleandoc

from bapipe.cli.flags import with_flags

_ENTRY = re.compile(r"    (\w+): (.*(?:\n {8,}.*)*)")


def attribute_docs(cls: type) -> dict[str, str]:
    """Returns the text of each attribute in the `Attributes:` section of a dataclass's docstring, for the command line.

    Names of other attributes in backticks become the flags that set them. All texts are empty with `python -OO`, which
    removes docstrings.
    """
    _, _, section = cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    section = section.split("\n\n")[0]
    texts = {match[1]: " ".join(match[2].split()) for match in _ENTRY.finditer(section)}
    of_fields = {field.name: texts.get(field.name, "") for field in fields(cls)}
    return {name: with_flags(text[:1].upper() + text[1:]) for name, text in of_fields.items()}
