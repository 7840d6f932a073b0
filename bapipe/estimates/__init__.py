"""Estimates profiles of groups from those of single devices.

`estimate.py` is the entry; `split_layers.py` decides what one member does of each layer and what the members exchange
for it, by the rules of `split_channels.py` and `split_planes.py`; `exchange.py` says how long that takes.
"""

from bapipe.estimates.estimate import check_whole, estimate

__all__ = ["check_whole", "estimate"]
