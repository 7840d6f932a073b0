"""Callbacks that say how far a long piece of work is; one name for each signature."""

from collections.abc import Callable

PartsProgress = Callable[[int, int, str], None]
"""(parts done, number of parts, what comes next)"""

SearchProgress = Callable[[int, int, int], None]
"""(plans judged, best step time, lower bound), both times in nanoseconds."""
