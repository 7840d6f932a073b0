"""Text for people: names with escapes for what a terminal would obey or nobody could see, and lists of a few."""

from collections.abc import Sequence

MAX_CHARS = 400
"""Longest name that is shown whole."""

MAX_NAMED = 4
"""Most devices that are named one by one where something is wrong with them."""

MAX_LINE = 2000
"""Longest sentence with names that is shown whole."""


def printable(text: str, max_chars: int = MAX_CHARS) -> str:
    r"""Returns a text on one line that shows every character, without its middle if it is long.

    Control characters, line breaks, marks that change the direction of writing, characters without width and halves of
    surrogate pairs become escapes such as `\x1b`, `\n` and `\u202e`.
    """
    if len(text) > max_chars:
        text = f"{text[: max_chars * 2 // 3]}…{text[-(max_chars // 3) :]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shortened(text: str, length: int = 60) -> str:
    """Returns a text on one line, cut to a length."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}..."


def and_others(texts: list[str], what: str) -> list[str]:
    """Returns the first texts, and how many others there are: "9 other ..."."""
    num_others = len(texts) - MAX_NAMED
    return [*texts[:MAX_NAMED], f"{num_others} other {what}"] if num_others > 0 else texts


def counted(number: int, what: str) -> str:
    """Returns how many there are of something, such as "1 layer" and "2,000 layers"; "batch" makes "batches"."""
    ending = "" if number == 1 else "es" if what.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {what}{ending}"


def are_one_layer(paths: Sequence[str], kind: str) -> str:
    """Says that modules of one class are one layer each."""
    if len(paths) == 1:
        return f"'{paths[0]}' is one layer"
    return f"'{paths[0]}' and {len(paths) - 1:,} more of class {kind} are one layer each"
