"""bapipe: balanced pipeline-parallel plans for torch models, proven and run.

    profile -> plan -> simulate or run

Begin with three functions: `profile` measures a model's layers, `plan` chooses stages and a schedule and proves how
good they are, `run` trains as planned. Their data are `ModelProfile`, `Cluster` and `Plan`, each a JSON file (`read`,
`write`). What is not exported here is internal and may change.

Importing this loads nothing else: each public name is imported from its module when it is first used, and torch only
when something measures or trains.
"""

from importlib import import_module
from importlib.util import find_spec

TYPE_CHECKING = False
"""What `typing` calls so, which takes longer to import than this: until a command has begun, Ctrl-C is a traceback."""

if TYPE_CHECKING:
    from bapipe.errors import (
        BapipeError,
        ConstraintsUnmet,
        Infeasible,
        InvalidFile,
        InvalidModel,
        InvalidSchedule,
        LayerFailed,
        RunFailed,
        Stopped,
    )
    from bapipe.formats.certificate import Certificate
    from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
    from bapipe.formats.codec import read, write
    from bapipe.formats.multigraph import to_networkx
    from bapipe.formats.plan import Alternative, Plan
    from bapipe.formats.prediction import Prediction
    from bapipe.formats.profile import ModelProfile
    from bapipe.formats.settings import Settings
    from bapipe.formats.stage_plan import StagePlan
    from bapipe.losses import weighted_mean
    from bapipe.planner.compare import Comparison, compare
    from bapipe.planner.edit import Changes, edit
    from bapipe.planner.inputs.goal import Goal
    from bapipe.planner.inputs.options import PlanOptions
    from bapipe.planner.make import make
    from bapipe.planner.plan import plan
    from bapipe.planner.simulate import simulate
    from bapipe.profiler.profile import profile
    from bapipe.runtime.evaluation import ForwardResult
    from bapipe.runtime.pipeline import Pipeline
    from bapipe.runtime.training_steps import PendingLoss
    from bapipe.simulator.timeline import Timeline
    from bapipe.training.run import run
    from bapipe.training.train_config import TrainConfig
    from bapipe.training.train_result import Evaluation, StepReport, TrainResult
    from bapipe.zoo.data.dataset import PipelineDataset
    from bapipe.zoo.example import Example, GenerationConfig

_MODULE_OF = {
    "Alternative": "bapipe.formats.plan",
    "Bandwidth": "bapipe.formats.cluster",
    "BapipeError": "bapipe.errors",
    "Certificate": "bapipe.formats.certificate",
    "Changes": "bapipe.planner.edit",
    "Cluster": "bapipe.formats.cluster",
    "Comparison": "bapipe.planner.compare",
    "ConstraintsUnmet": "bapipe.errors",
    "Device": "bapipe.formats.cluster",
    "Evaluation": "bapipe.training.train_result",
    "Example": "bapipe.zoo.example",
    "ForwardResult": "bapipe.runtime.evaluation",
    "GenerationConfig": "bapipe.zoo.example",
    "Goal": "bapipe.planner.inputs.goal",
    "Infeasible": "bapipe.errors",
    "InvalidFile": "bapipe.errors",
    "InvalidModel": "bapipe.errors",
    "InvalidSchedule": "bapipe.errors",
    "LayerFailed": "bapipe.errors",
    "Link": "bapipe.formats.cluster",
    "ModelProfile": "bapipe.formats.profile",
    "PendingLoss": "bapipe.runtime.training_steps",
    "Pipeline": "bapipe.runtime.pipeline",
    "PipelineDataset": "bapipe.zoo.data.dataset",
    "Plan": "bapipe.formats.plan",
    "PlanOptions": "bapipe.planner.inputs.options",
    "Prediction": "bapipe.formats.prediction",
    "RunFailed": "bapipe.errors",
    "Settings": "bapipe.formats.settings",
    "StagePlan": "bapipe.formats.stage_plan",
    "StepReport": "bapipe.training.train_result",
    "Stopped": "bapipe.errors",
    "Timeline": "bapipe.simulator.timeline",
    "TrainConfig": "bapipe.training.train_config",
    "TrainResult": "bapipe.training.train_result",
    "compare": "bapipe.planner.compare",
    "edit": "bapipe.planner.edit",
    "make": "bapipe.planner.make",
    "plan": "bapipe.planner.plan",
    "profile": "bapipe.profiler.profile",
    "read": "bapipe.formats.codec",
    "run": "bapipe.training.run",
    "simulate": "bapipe.planner.simulate",
    "to_networkx": "bapipe.formats.multigraph",
    "weighted_mean": "bapipe.losses",
    "write": "bapipe.formats.codec",
}
"""The module that defines each public name."""

__all__ = [  # a literal, so that type checkers and documentation tools can read it; equal to the keys of _MODULE_OF
    "Alternative",
    "Bandwidth",
    "BapipeError",
    "Certificate",
    "Changes",
    "Cluster",
    "Comparison",
    "ConstraintsUnmet",
    "Device",
    "Evaluation",
    "Example",
    "ForwardResult",
    "GenerationConfig",
    "Goal",
    "Infeasible",
    "InvalidFile",
    "InvalidModel",
    "InvalidSchedule",
    "LayerFailed",
    "Link",
    "ModelProfile",
    "PendingLoss",
    "Pipeline",
    "PipelineDataset",
    "Plan",
    "PlanOptions",
    "Prediction",
    "RunFailed",
    "Settings",
    "StagePlan",
    "StepReport",
    "Stopped",
    "Timeline",
    "TrainConfig",
    "TrainResult",
    "compare",
    "edit",
    "make",
    "plan",
    "profile",
    "read",
    "run",
    "simulate",
    "to_networkx",
    "weighted_mean",
    "write",
]


_NEEDS_TORCH = frozenset(
    {"Example", "ForwardResult", "GenerationConfig", "PendingLoss", "Pipeline", "PipelineDataset", "weighted_mean"}
)
"""Names that cannot be imported without torch; other functions need it when they are called, if at all."""

if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> object:
        """Imports a public name when it is first used; `bapipe --help` would otherwise wait for the whole planner."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'bapipe' has no attribute '{name}'")
        if name in _NEEDS_TORCH:
            import_module("bapipe._optional").require_torch()
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # later accesses find the name without this function
        return value


def __dir__() -> list[str]:
    missing = _NEEDS_TORCH if find_spec("torch") is None else frozenset()  # so that `help` works
    return sorted({*globals(), *_MODULE_OF} - missing)
