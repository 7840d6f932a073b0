"""What several files of tests on models need."""

from tests.multiprocess.conftest import alone

__all__ = ["alone"]
