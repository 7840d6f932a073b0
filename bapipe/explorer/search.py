"""A plan searched in the background, while the page shows how far it is."""

import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from bapipe.errors import BapipeError
from bapipe.explorer.answers import Json
from bapipe.explorer.state import State
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan import plan


class _Cancelled(Exception):
    """The user does not want the plan any more."""


class Search:
    """At most one search at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._status: Json = {"running": False}

    def begin(
        self,
        profiles: Mapping[str, ModelProfile],
        cluster: Cluster,
        options: PlanOptions,
        adopt: Callable[[Plan], State],
    ) -> None:
        """Begins a search; one that runs already is cancelled."""
        with self._lock:
            self._number += 1
            number = self._number
            self._status = {"running": True, "simulated": 0, "began": time.monotonic()}

        def search() -> None:
            try:
                state = adopt(plan(profiles, cluster, options, progress=lambda *found: self._report(number, found)))
            except _Cancelled:
                return
            except BapipeError as error:
                self._finish(number, {"running": False, "error": str(error).replace("`", "")})
            else:
                self._finish(number, {"running": False, "state": msgspec.to_builtins(state)})

        threading.Thread(target=search, daemon=True, name="search").start()

    def cancel(self) -> None:
        """Stops the search, if one runs."""
        with self._lock:
            self._number += 1
            self._status = {"running": False}

    def status(self) -> Json:
        """Returns whether a search runs and how far it is, or what it found."""
        with self._lock:
            return dict(self._status)

    def _report(self, number: int, found: tuple[int, int, int]) -> None:
        simulated, best_ns, bound_ns = found
        with self._lock:
            if number != self._number:
                raise _Cancelled
            self._status |= {"simulated": simulated, "best": best_ns, "bound": bound_ns}

    def _finish(self, number: int, status: Json) -> None:
        with self._lock:
            if number == self._number:
                self._status = status
