"""Sizes that no command could work with are refused before anything is measured."""

import pytest

from bapipe.cli.options import integers
from bapipe.errors import BapipeError


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
