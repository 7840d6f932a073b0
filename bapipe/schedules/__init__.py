"""Schedules by name. A new one is a function in a file of its own and one line here."""

from collections.abc import Callable

from bapipe.schedule import Schedule
from bapipe.schedules.gpipe import gpipe
from bapipe.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""`(num_stages, num_microbatches) -> Schedule`, with stage s on rank s."""
