"""Callbacks that say how far a long piece of work is; one name for each signature."""

from collections.abc import Callable

PartsProgress = Callable[[int, int, str], None]
"""(parts done, number of parts, what comes next)"""

SearchProgress = Callable[[int, int, int], None]
"""(plans simulated, best step time, lower bound), both times in nanoseconds."""

LoadProgress = Callable[[float, float], None]
"""(best load so far, or the limit below which there is no plan; lower bound), both in nanoseconds."""

ParetoProgress = Callable[[int, int], None]
"""(number of devices, memory limit in bytes) of the next plan to search for."""
