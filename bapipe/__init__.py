"""bapipe: balanced pipeline-parallel plans for torch models, proven and run.

    profile -> plan -> simulate or run

Importing this loads neither torch nor a solver; `Pipeline`, `Example` and whatever measures or trains load torch.
"""

from typing import TYPE_CHECKING, Any

# isort: off
from bapipe.cluster import Bandwidth, Cluster, Device, Link
from bapipe.codec import read, write
from bapipe.errors import BapipeError, Infeasible, InvalidFile, InvalidModel, InvalidSchedule, RunFailed
from bapipe.plan import Alternative, Certificate, Plan, Prediction, StagePlan
from bapipe.profile import ModelProfile
from bapipe.timeline import Timeline
from bapipe.api import plan, profile, run, simulate  # last: three have the name of a module imported above
# isort: on

if TYPE_CHECKING:
    from bapipe.runtime.pipeline import Pipeline
    from bapipe.zoo.example import Example

__all__ = [
    "Alternative",
    "Bandwidth",
    "BapipeError",
    "Certificate",
    "Cluster",
    "Device",
    "Example",
    "Infeasible",
    "InvalidFile",
    "InvalidModel",
    "InvalidSchedule",
    "Link",
    "ModelProfile",
    "Pipeline",
    "Plan",
    "Prediction",
    "RunFailed",
    "StagePlan",
    "Timeline",
    "plan",
    "profile",
    "read",
    "run",
    "simulate",
    "write",
]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from bapipe.runtime.pipeline import Pipeline

        return Pipeline
    if name == "Example":
        from bapipe.zoo.example import Example

        return Example
    raise AttributeError(f"module 'bapipe' has no attribute '{name}'")
