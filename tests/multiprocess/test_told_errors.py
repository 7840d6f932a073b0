"""In a loop of a user's own all processes of a pipeline end with the reason if one fails, or calls what others do not."""

from dataclasses import replace

import pytest

from bapipe.training.launch.processes import launch
from tests.multiprocess.told_errors_cases import CASES, Ended, own_loops

OWN = {
    "a target that the last stage refuses": (3, "BapipeError", "'target' has 3 samples; the plan's mini-batch is 4"),
    "a forward of one replica": (2, "LayerFailed", "layer '1' (stage 1) fails in the forward of micro-batch 1: Val"),
    "a backward, while others wait to clip": (0, "LayerFailed", "stage 0 fails in the backward of micro-batch 0: Val"),
    "an evaluation that the first stage refuses": (
        0,
        "BapipeError",
        "'input' has 3 samples; the plan's mini-batch is 4",
    ),
}
"""By case, the process that fails, and its own error."""

DIFFERENT = {
    "the first process alone evaluates": (0, "`evaluate` of 4 samples", "`step`"),
    "the last process alone evaluates": (3, "`evaluate` of 4 samples", "`step`"),
    "one replica of an only stage evaluates": (1, "`evaluate` of 4 samples", "`step`"),
    "evaluations of other sizes": (0, "`evaluate` of 2 samples", "`evaluate` of 4 samples"),
    "a replica that steps once more": (2, "`step`", "`evaluate` of 4 samples"),
}
"""By case, the process that calls something else than the others, what it calls, and what they do."""

STAGE_OF = (0, 1, 1, 2)


@pytest.fixture(scope="module")
def of_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ended]]:
    """By process, how each case has ended; torch's own limit is half an hour."""
    return launch(own_loops, ["cpu0", "cpu1", "cpu2", "cpu3"], tmp_path_factory.mktemp("loops"), timeout_s=100)


@pytest.mark.parametrize("case", OWN)
def test_all_processes_end_with_the_reason_if_one_fails(case: str, of_processes: list[dict[str, Ended]]) -> None:
    # The one that fails goes on, and keeps its connections.
    failing, kind, text = OWN[case]
    own = of_processes[failing][case]
    assert own.kind == kind
    assert own.text.startswith(text)
    told = Ended("RunFailed", f"process {failing} (stage {STAGE_OF[failing]}) has failed: {own.text}")
    others = [ended[case] for process, ended in enumerate(of_processes) if process != failing]
    assert [replace(ended, again="") for ended in others] == [told] * 3
    for ended in others if kind == "BapipeError" else [own, *others]:
        assert ended.again.startswith("this pipeline can run nothing more")
        assert f" has failed: {ended.text};" in ended.again


@pytest.mark.parametrize("case", DIFFERENT)
def test_all_processes_end_if_they_call_different_things(case: str, of_processes: list[dict[str, Ended]]) -> None:
    process, own, others = DIFFERENT[case]
    called = [f"process {p} (stage {0 if 'only stage' in case else STAGE_OF[p]})" for p in range(4)]
    called = [f"{who} has called {own if p == process else others}" for p, who in enumerate(called)]
    rule = (
        ": all processes of a pipeline call `step` and `evaluate` together, in the same order, also those that get no "
    )
    neighbours = [sorted([process, (process + by) % 4]) for by in (-1, 1)]
    texts = {f"{called[first]} where {called[second]}{rule}result of it" for first, second in neighbours}
    for ended in (each[case] for each in of_processes):
        assert ended.kind == "RunFailed"
        assert ended.text in texts
        assert f" has failed: {ended.text};" in ended.again


def test_processes_that_all_refuse_the_same_go_on(of_processes: list[dict[str, Ended]]) -> None:
    (refused,) = {ended["a bucket that all refuse"] for ended in of_processes}
    assert refused.kind == "BapipeError"
    assert refused.text.startswith("`bucket` is 1: this pipeline was made with 0 `buckets`")
    assert not refused.again


def test_a_process_that_ends_is_named(of_processes: list[dict[str, Ended]]) -> None:
    *others, gone = (ended["the last process closes its connections"] for ended in of_processes)
    assert gone == Ended()
    for ended in others:
        assert ended.kind == "RunFailed"
        assert "process 3 has ended, as where it was killed or its own code failed" in ended.text
    first = others[0].text.partition(": ")[0]
    assert first in {f"process {process} (stage 1) has lost another one" for process in (1, 2)}


def test_each_case_has_a_test() -> None:
    assert CASES.keys() == {
        *OWN,
        *DIFFERENT,
        "a bucket that all refuse",
        "the last process closes its connections",
    }
