"""Damages a file at random: bytes, numbers and lines of any text, and values of JSON by its structure."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

LONG = 20_000
"""Most times that a piece is repeated."""

_NAMES = (
    "",
    "x" * 10_000,
    "\x1b[31m\x9b2J",
    "<script>",
    "[/bold]",
    "\u202eabc",
    "a\nb",
    "a\x00b",
    "../../etc/passwd",
    "os:system",
    "=1+1",
    "💥",
)
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 0.5, -0.0, 1e-300, 1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**30, [], {}, [None], [[]],
    {"a": {"b": []}}, *_NAMES,
)  # fmt: skip
_NUMBERS = (b"0", b"-1", b"1e308", b"1e999", b"1.2.3", b"nan", b"inf", b"9223372036854775807", b"1" * 5000, b"1e-320")
_PIECES = (b"\x00", b"\xff", b"\xe2\x80\xae", b"\x1b[2J", b'"', b"\\", b"[", b"]", b"{", b"}", b",", b"\n", b"\t", b" ")


def mutated(content: bytes, random: Random) -> bytes:
    """Returns a content with one to three damages."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = random.choice(_DAMAGES)(content, random)
    return content


def _flip(content: bytes, random: Random) -> bytes:
    at = random.randrange(max(len(content), 1))
    return content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]


def _remove(content: bytes, random: Random) -> bytes:
    begin, end = _span(content, random)
    return content[:begin] + content[end:]


def _cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _repeat(content: bytes, random: Random) -> bytes:
    begin, end = _span(content, random)
    piece = content[begin:end][:200]
    return content[:end] + piece * random.choice((1, 2, 50, LONG // (len(piece) + 1))) + content[end:]


def _insert(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content) + 1)
    return content[:at] + random.choice(_PIECES) * random.choice((1, 1, 3, LONG)) + content[at:]


def _move(content: bytes, random: Random) -> bytes:
    begin, end = _span(content, random)
    rest = content[:begin] + content[end:]
    at = random.randrange(len(rest) + 1)
    return rest[:at] + content[begin:end] + rest[at:]


def _number(content: bytes, random: Random) -> bytes:
    numbers = list(re.finditer(rb"[0-9.]+", content))
    if not numbers:
        return content
    found = random.choice(numbers)
    return content[: found.start()] + random.choice(_NUMBERS) + content[found.end() :]


def _lines(content: bytes, random: Random) -> bytes:
    lines = content.split(b"\n")
    random.shuffle(lines)
    return b"\n".join(lines[: random.randrange(len(lines)) + 1])


def _value(content: bytes, random: Random) -> bytes:
    """Replaces, removes, repeats or exchanges a value of JSON, or adds a key."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return _number(content, random)
    at = tree
    while isinstance(at, dict | list) and at:
        key = random.choice(list(at) if isinstance(at, dict) else range(len(at)))
        child = at[key]
        if isinstance(child, dict | list) and child and random.random() < 0.85:
            at = child
            continue
        damage = random.randrange(5)
        if damage == 0:
            del at[key]
        elif damage == 1:
            at[key] = random.choice(list(at.values()) if isinstance(at, dict) else at)
        elif damage == 2 and isinstance(at, dict):
            at[random.choice(_NAMES)] = child
        elif damage == 2 and isinstance(at, list):
            at.insert(random.randrange(len(at)), child)
        else:
            at[key] = random.choice(_VALUES)
        break
    return json.dumps(tree).encode()


def _span(content: bytes, random: Random) -> tuple[int, int]:
    begin = random.randrange(len(content) + 1)
    return begin, min(begin + random.choice((1, 1, 8, 100, len(content))), len(content))


_Damage = Callable[[bytes, Random], bytes]
_DAMAGES: tuple[_Damage, ...] = (_flip, _remove, _cut, _repeat, _insert, _move, _number, _number, _lines) + (
    _value,
) * 8
