"""Sizes and options that no command could work with are refused in one line, before anything is measured."""

from pathlib import Path
from random import Random

import pytest

from bapipe.cli.options import integers
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


@pytest.mark.parametrize("command", ["plan", "edit", "simulate", "show", "import", "estimate"])
def test_absurd_values_of_options_end_in_an_answer_or_one_line(command: str, tmp_path: Path) -> None:
    """Some of the calls that `python -m benchmarks.fuzz.options` makes for every command."""
    prepare(tmp_path)
    for arguments in Random(command).sample(list(calls(command)), 8):
        assert not forked_fault(arguments, tmp_path, limit_s=20), shortened(arguments)
