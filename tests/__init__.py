"""Tests. The folders mirror `bapipe/`; see also `property/`, `oracles/`, `models/` and `multiprocess/`."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The folder of the repository."""

NO_UNPICKLING = ROOT / "tests" / "no_unpickling"
"""The folder of a module that makes unpickling a file impossible in every Python process that has it on its path."""

PYTHONPATH = os.pathsep.join((str(ROOT), str(NO_UNPICKLING)))
"""The path of a process that a test starts."""
