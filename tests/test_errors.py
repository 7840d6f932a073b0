"""Errors are the same in another process."""

import copy
import pickle
import signal

import pytest

from bapipe.errors import ConstraintsUnmet, Infeasible, InvalidFile, RunFailed, Stopped, first_line


@pytest.mark.parametrize(
    "error",
    [
        InvalidFile("want a number", "$.layers[3]"),
        Infeasible("nothing fits", is_proven=False),
        ConstraintsUnmet("no plan", is_proven=False),
        RunFailed("a rank died", told=True, lost=("cpu0",)),
        Stopped(signal.SIGTERM, " after step 3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_copied_and_sent_to_another_process(error: BaseException) -> None:
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize(
    ("text", "line"),
    [("\n  two\twords,  far apart \nmore", "two words, far apart"), (" \n ", "ValueError")],
)
def test_the_first_line_of_an_error_has_one_blank_between_words(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line
