"""bapipe: balanced pipeline-parallel plans for torch models, proven and run.

    profile -> plan -> simulate or run

Importing this loads neither torch nor a solver; `Pipeline`, `Example` and whatever measures or trains load torch.
"""

from typing import TYPE_CHECKING, Any

from bapipe.errors import BapipeError, Infeasible, InvalidFile, InvalidModel, InvalidSchedule, RunFailed
from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.formats.codec import read, write
from bapipe.formats.plan import Alternative, Certificate, Plan, Prediction, StagePlan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.plan import plan, simulate
from bapipe.profiler.profile import profile
from bapipe.runtime.run import run
from bapipe.simulator.timeline import Timeline

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
