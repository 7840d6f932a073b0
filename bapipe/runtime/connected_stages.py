"""What of a rank's stages runs and communicates, from when it is made until it is closed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bapipe.equivalence.outcome import Loss
from bapipe.runtime.call_order import CallOrder
from bapipe.runtime.clock import Clock
from bapipe.runtime.evaluation import ForwardExecutor
from bapipe.runtime.executor import ScheduleExecutor
from bapipe.runtime.process_groups import OwnGroups, connect_channels, connect_replicas, connect_tied_weights
from bapipe.runtime.rank_stages import RankStages
from bapipe.runtime.replicas import Replicas
from bapipe.runtime.stage_executors import ExecutorFactory
from bapipe.runtime.tied_weights import TiedGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedStages:
    """The executors of a rank's stages, and what sums their gradients over processes.

    Attributes:
        tied: the parameters that other processes use too.
        replicas: those of this rank's stages that run on several ranks, by stage.
        executors: one for each input size, as torch's stages have buffers of fixed shapes; the planned size is first.
        evaluation: the executor to evaluate with; None if the pipeline does not evaluate.
    """

    tied: TiedGradients
    replicas: Mapping[int, Replicas]
    executors: Sequence[ScheduleExecutor]
    evaluation: ForwardExecutor | None


def connect_stages(
    own: RankStages,
    groups: OwnGroups,
    loss: Loss,
    autocast: torch.dtype | None,
    clock: Clock,
    calls: CallOrder,
) -> ConnectedStages:
    """Connects a rank's stages with those of other ranks; all processes of the layout's group call it together.

    Process groups are made in `groups`. `autocast` is the dtype of autocast for forwards and the loss; None without.
    `calls` are those of the pipeline.

    Raises:
        BapipeError: a group of some of the processes is needed, and the layout's group is not the default one.
    """
    layout, trained, evaluated = own.layout, own.cut.trained, own.cut.evaluated
    tied = connect_tied_weights(layout, groups, trained)
    replicas = connect_replicas(layout, groups, trained, own.modules, tied.parameters, loss, clock)
    executors = ExecutorFactory(
        plan=own.plan,
        layout=layout,
        modules=own.modules,
        replicas=replicas,
        channels=connect_channels(layout, groups, calls),
        loss=loss,
        sample_dims=own.sample_dims,
        autocast=autocast,
        clock=clock,
        rng=own.rng,
    )
    return ConnectedStages(
        tied=tied,
        replicas=replicas,
        executors=[executors.training(parts) for parts in own.sized],
        evaluation=None if evaluated is None else executors.evaluation(evaluated),
    )
