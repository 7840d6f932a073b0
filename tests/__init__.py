"""Tests. The folders mirror `bapipe/`; see also `property/`, `oracles/`, `models/` and `multiprocess/`."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The folder of the repository."""
