"""Sizes and options that no command could work with are refused in one line, before anything is measured."""

from pathlib import Path
from random import Random

import pytest
import typer

from bapipe.cli.goal import share
from bapipe.cli.options import integers, num_bytes
from bapipe.errors import BapipeError
from benchmarks.fuzz.options import calls, forked_fault, prepare, shortened


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,1000000000000000000000000000000", "'1,1000000000000000000000000000000': want micro-batches of at most 1,048,576 samples"),
        ("9" * 5000, f"'{'9' * 80}' is not a list of different positive integers such as 1,2,4,8"),
        ("1,,2", "'1,,2' is not a list of different positive integers such as 1,2,4,8"),
    ],
)  # fmt: skip
def test_micro_batch_sizes(text: str, message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        integers(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2TB", 2 * 10**12),
        ("2 tib", 2**41),
        ("1.5GiB", 3 * 2**29),
        ("8gb", 8 * 10**9),
        ("3kb", 3000),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_sizes_of_memory(text: str, size: int) -> None:
    assert num_bytes(text) == size


def test_a_size_in_an_unknown_unit_is_refused_with_the_known_ones() -> None:
    with pytest.raises(typer.BadParameter, match=r"want bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB"):
        num_bytes("2PB")


@pytest.mark.parametrize(
    ("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("1", 1.0), ("0", 0.0), ("400%", 4.0), ("0.7%", 0.007)]
)
def test_shares(text: str, value: float) -> None:
    assert share(text) == value


@pytest.mark.parametrize(("text", "wanted"), [("5", "use 0.05 or 5%"), ("1.5", "use 0.015 or 1.5%")])
def test_a_share_of_more_than_the_whole_needs_a_percent_sign(text: str, wanted: str) -> None:
    with pytest.raises(typer.BadParameter, match=wanted):
        share(text)


@pytest.mark.parametrize("command", ["plan", "edit", "simulate", "show", "import", "estimate"])
def test_absurd_values_of_options_end_in_an_answer_or_one_line(command: str, tmp_path: Path) -> None:
    """Some of the calls that `python -m benchmarks.fuzz.options` makes for every command."""
    prepare(tmp_path)
    for arguments in Random(command).sample(list(calls(command)), 8):
        assert not forked_fault(arguments, tmp_path, limit_s=20), shortened(arguments)
