"""What holds for every test: no file is unpickled, neither here nor in a process that a test starts."""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location

from tests import NO_UNPICKLING

# Processes that tests start find it by PYTHONPATH, ranks by the path of this process.
sys.path.append(str(NO_UNPICKLING))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(NO_UNPICKLING), os.environ.get("PYTHONPATH"))))

_spec = spec_from_file_location("no_unpickling", NO_UNPICKLING / "sitecustomize.py")
assert _spec is not None
assert _spec.loader is not None
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.install()
