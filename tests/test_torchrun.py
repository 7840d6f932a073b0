"""Whether this process is a rank of a job: one place decides it, by what torchrun sets."""

import pytest

from bapipe.planner.inputs.clusters import probed_cluster
from bapipe.profiler import probe
from bapipe.torchrun import current_job, is_first_rank
from tests.sources import FILES, relative
from tests.test_conventions import strings


def set_variables(monkeypatch: pytest.MonkeyPatch, rank: str | None, size: str | None) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("rank", "size", "job", "is_first"),
    [
        ("0", "4", (0, 4), True),
        ("3", "4", (3, 4), False),
        (None, None, None, True),
        ("1", None, None, True),
        (None, "4", None, True),
        ("gold", "4", None, True),
        ("", "", None, True),
    ],
)
def test_rank_and_size_together_make_a_job(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, size: str | None, job: tuple[int, int] | None, is_first: bool
) -> None:
    set_variables(monkeypatch, rank, size)
    found = current_job()
    assert (found and (found.rank, found.size)) == job
    assert is_first_rank() is is_first


def test_one_file_reads_these_variables() -> None:
    readers = {relative(path) for path in FILES if {"RANK", "WORLD_SIZE"} & set(strings(path))}
    assert readers == {"torchrun.py"}


def test_with_a_rank_alone_links_are_probed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, "1", None)
    monkeypatch.setattr(probe, "probe_here", lambda num_devices, kind: (num_devices, kind))
    probed: object = probed_cluster(1, "cpu", lambda done, total, part: None)
    assert probed == (1, "cpu")
