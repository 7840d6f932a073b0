"""In a loop of a user's own all processes of a pipeline end with the reason if one of them fails."""

from pathlib import Path

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

STAGE_OF = (0, 1, 1, 2)


def test_all_processes_end_with_the_reason_if_one_fails(tmp_path: Path) -> None:
    # The one that fails goes on, and keeps its connections; torch's own limit is half an hour.
    of_processes = launch(own_loops, ["cpu0", "cpu1", "cpu2", "cpu3"], tmp_path, timeout_s=100)
    for case, (failing, kind, text) in OWN.items():
        own = of_processes[failing][case]
        assert own.kind == kind, (case, own)
        assert own.text.startswith(text), (case, own)
        told = Ended("RunFailed", f"process {failing} (stage {STAGE_OF[failing]}) has failed: {own.text}")
        others = [ended[case] for process, ended in enumerate(of_processes) if process != failing]
        assert others == [told] * 3, (case, others)
    (refused,) = {ended["a bucket that all refuse"] for ended in of_processes}
    assert refused.kind == "BapipeError"
    assert refused.text.startswith("`bucket` is 1: this pipeline was made with 0 `buckets`")
    *others, gone = (ended["the last process closes its connections"] for ended in of_processes)
    assert gone == Ended()
    for ended in others:
        assert ended.kind == "RunFailed"
        assert "process 3 has ended, as where it was killed or its own code failed" in ended.text
    first = others[0].text.partition(": ")[0]
    assert first in {f"process {process} (stage 1) has lost another one" for process in (1, 2)}
    assert CASES.keys() == {*OWN, "a bucket that all refuse", "the last process closes its connections"}
