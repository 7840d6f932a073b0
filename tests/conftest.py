"""What holds for every test: no file is unpickled, here or in a process that a test starts, and signals end processes.

A shell starts what runs in its background with SIGINT ignored, nohup with SIGHUP ignored; processes would inherit that.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from bapipe import processes
from tests import NO_UNPICKLING
from tests.forked_ranks import start as start_forked

# Processes that tests start find it by PYTHONPATH, ranks by the path of this process; before a `sitecustomize` of the system.
sys.path.insert(0, str(NO_UNPICKLING))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(NO_UNPICKLING), os.environ.get("PYTHONPATH"))))

# Tests start hundreds of processes; each would compile the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# torch's threads would otherwise spin while they wait for work, on cores that the other tests need. Read by its libraries
# when they are loaded, here and in processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

_spec = spec_from_file_location("no_unpickling", NO_UNPICKLING / "sitecustomize.py")
assert _spec is not None
assert _spec.loader is not None
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.install()


def pytest_collection_finish() -> None:
    """Lets the garbage collector pass over what importing has made, which lives as long as this process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def kept_by_files() -> Iterator[None]:
    """The same of what the tests of a file leave, as parsed sources and modules: runs look for garbage at their start."""
    yield
    gc.collect()
    gc.freeze()


STARTED_ANEW = {"test_processes", "test_no_unpickling", "test_launch", "test_faults", "test_probe"}
"""The files about how processes start and end: theirs are not copies."""


@pytest.fixture(autouse=True, scope="module")
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that the tests of a file start in this process, see `tests.forked_ranks`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2] not in STARTED_ANEW:
            patch.setattr(processes, "_start", start_forked)
        yield


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as a group of torch's of its own."""
    import torch.distributed as dist  # most tests need no torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """This process computing with one thread, as a rank does by default; a pipeline compares that with its plan."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
