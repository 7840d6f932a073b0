"""Ranks of a job wait for one another by name, and agree on who reports a failure."""

import threading

import pytest
from torch.distributed import PrefixStore, TCPStore

from bapipe.errors import RunFailed
from bapipe.runtime.launch.rendezvous import another_rank_reports, open_store, wait_for_all

NAMES = ("cpu0", "gpu1", "gpu2")


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore("job", TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False))


def test_all_ranks_wait_for_one_another(store: PrefixStore) -> None:
    ranks = [threading.Thread(target=wait_for_all, args=(store, index, NAMES, 20.0)) for index in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert not any(rank.is_alive() for rank in ranks)


def test_the_ranks_that_are_missing_are_named(store: PrefixStore) -> None:
    with pytest.raises(RunFailed) as caught:
        wait_for_all(store, 1, NAMES, 0.2)
    assert str(caught.value) == (
        "rank 0 (cpu0), rank 2 (gpu2) did not join the job in 0.2 s: start all ranks, and see what ended them"
    )


def test_a_failed_rank_ends_the_waiting(store: PrefixStore) -> None:
    assert not another_rank_reports(store, lost_peer=False)
    with pytest.raises(RunFailed) as caught:
        wait_for_all(store, 1, NAMES, 20.0)
    assert str(caught.value) == "rank 0 (cpu0), rank 2 (gpu2) did not join the job, of which a rank failed"


def test_the_first_rank_that_fails_reports(store: PrefixStore) -> None:
    assert [another_rank_reports(store, lost_peer=False) for _ in range(3)] == [False, True, True]


def test_a_rank_that_lost_its_peer_lets_the_cause_be_reported_first(store: PrefixStore) -> None:
    cause = threading.Timer(0.2, another_rank_reports, (store, False))
    cause.start()
    assert another_rank_reports(store, lost_peer=True)
    cause.join()


def test_a_restarted_job_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    host = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(host.port))
    for attempt, names in (("0", NAMES), ("1", NAMES), ("1", NAMES[:2])):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        joined = open_store(0, names, 20.0)
        assert joined.add("failed", 1) == 1  # nothing is left of the attempts before
    assert host.check(["bapipe0of3/failed", "bapipe1of3/failed", "bapipe1of2/failed"])
