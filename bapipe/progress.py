"""Callbacks that report the progress of long work; one name for each signature."""

from collections.abc import Callable

PartsProgress = Callable[[int, int, str], None]
"""(parts done, number of parts, name of the next part)"""

SearchProgress = Callable[[int, int, int], None]
"""(plans simulated, best step time, lower bound), both times in nanoseconds."""

LoadProgress = Callable[[float, float], None]
"""(best load so far, infinite as long as there is no plan; lower bound), both in nanoseconds."""

ParetoProgress = Callable[[int, int], None]
"""(number of devices, memory limit in bytes) of the next plan to search for."""
