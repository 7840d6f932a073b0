"""One long computation at a time, in a thread of its own, while the page shows how far it is."""

import logging
import threading
from collections.abc import Callable

from bapipe.errors import BapipeError, first_line
from bapipe.explorer.answers import Json
from bapipe.planner.compute.deadline import Deadline

_log = logging.getLogger(__name__)


class _Superseded(Exception):
    """Another job has begun, so nobody waits for this one."""


class Job:
    """A computation under way.

    Attributes:
        deadline: what it may take; a user who stops it makes it be over, and gets what was found by then.
    """

    def __init__(self, deadline: Deadline, report: Callable[["Job", Json], None]) -> None:
        self.deadline, self._report = deadline, report

    def report(self, **figures: object) -> None:
        """Tells the page how far it is; ends the thread if another job has begun."""
        self._report(self, figures)


class Background:
    """At most one job at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._status: Json = {"running": False}

    def begin(self, kind: str, seconds: float, work: Callable[[Job], Json]) -> None:
        """Begins a job; one that runs already is ended, and its result dropped.

        Args:
            kind: what the page calls it.
            work: returns the result.
        """
        job = Job(Deadline(seconds), self._progress)
        with self._lock:
            if self._job is not None:
                self._job.deadline.stop()
            self._job, self._status = job, {"running": True, "kind": kind}

        def run() -> None:
            try:
                found = work(job)
            except _Superseded:
                return
            except BapipeError as error:
                found = {"error": str(error).replace("`", "")}
            except Exception as fault:  # not the user's; the page must not wait for a thread that has ended
                _log.exception("%s failed", kind)
                found = {"error": f"{kind} failed: {first_line(fault)}; bapipe explore has printed where"}
            with self._lock:
                if self._job is job:
                    self._job, self._status = None, {"running": False, "kind": kind, **found}

        threading.Thread(target=run, daemon=True, name=kind).start()

    def stop(self) -> None:
        """Makes the job, if one runs, end with what it has found."""
        with self._lock:
            if self._job is not None:
                self._job.deadline.stop()

    def status(self) -> Json:
        """Returns whether a job runs and how far it is, or what it found."""
        with self._lock:
            return dict(self._status)

    def _progress(self, job: Job, figures: Json) -> None:
        with self._lock:
            if job is not self._job:
                raise _Superseded
            self._status = {**self._status, **figures}
