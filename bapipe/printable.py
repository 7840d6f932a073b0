"""Names from elsewhere as plain text: what a terminal would obey, or nobody could see, is written as an escape."""

MAX_CHARS = 400
"""Longest name that is shown whole."""

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
