"""Ranks that cannot connect all say what was wrong first."""

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from bapipe.errors import BapipeError, RunFailed
from bapipe.job.groups import _first_fault, _Job, _tell
from bapipe.job.lost_peer import lost_ranks_told

NAMES = ("cpu0", "cpu1", "cpu2")


def test_of_several_faults_the_first_one_is_the_cause() -> None:
    store, cause = HashStore(), "rank 2 (cpu2) cannot connect to the others: no route"
    jobs = [_Job(NAMES, index, b"", store) for index in range(3)]
    _tell(jobs[2], store, cause)
    _tell(jobs[1], store, "")
    _tell(jobs[0], store, "rank 0 (cpu0) cannot connect to the others: Connection closed by peer")
    assert [_first_fault(job, store, timedelta(seconds=20)) for job in jobs] == [cause] * 3


def test_a_rank_that_does_not_say_whether_it_is_connected_is_named() -> None:
    store = HashStore()
    job = _Job(NAMES, 0, b"", store)
    _tell(job, store, "")
    with pytest.raises(BapipeError) as caught:
        _first_fault(job, store, timedelta(seconds=0.1))
    assert str(caught.value) == (
        "rank 0 (cpu0) has waited 0.1 s for rank 1 (cpu1), rank 2 (cpu2) to connect to the others: see by which network "
        "interface it does so (GLOO_SOCKET_IFNAME) and what firewalls let through"
    )


def test_a_wait_that_takes_too_long_says_that_another_rank_hangs() -> None:
    with (
        pytest.raises(RunFailed, match=r"^another rank hangs, waits for one that does, or the link to it"),
        lost_ranks_told(),
    ):
        HashStore().wait(["what no rank sets"], timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match=r"^of a loader: timed out"), lost_ranks_told():
        raise RuntimeError("of a loader: timed out")
