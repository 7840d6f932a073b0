"""Refuses optimizers, losses, forwards and backwards that communicate with processes that do not run them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import fx, nn

from bapipe.equivalence.communication import CollectivesMode, forwards_checked
from bapipe.errors import BapipeError, InvalidModel
from bapipe.runtime.model_errors import PASSES
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.schedules.table import Action
from bapipe.torch_private.process_groups import num_collectives

MAX_NUMBERS = 8
"""Most elements of a tensor that an optimizer may send to other stages; one per parameter if it has more of these."""


def optimizer_checked(layout: ProcessLayout | None, stage: int, num_parameters: int) -> AbstractContextManager[object]:
    """Returns a context that raises BapipeError if a stage's optimizer sends tensors to others than its replicas.

    An optimizer for data parallelism, such as ZeroRedundancyOptimizer, would mix the layers of different stages.
    Tensors of up to `MAX_NUMBERS` elements, or one per parameter, such as norms, may be exchanged with all processes.
    Without a `layout` nothing is checked.
    """
    return _checked(
        layout,
        stage,
        max(num_parameters, MAX_NUMBERS),
        "the optimizer exchanges gradients or weights with processes that run other stages, as optimizers for data "
        "parallelism do (ZeroRedundancyOptimizer): layers of different stages would be mixed; use an optimizer for one "
        "process, because gradients of replicas are summed before it runs",
    )


def loss_checked(layout: ProcessLayout, stage: int) -> AbstractContextManager[object]:
    """Returns a context that raises BapipeError if the loss communicates with others than the replicas of its stage.

    Other processes never compute the loss, so a collective with them would wait until the timeout.
    """
    return _checked(
        layout,
        stage,
        -1,
        "the loss communicates with processes that run other stages and do not compute it, such as by "
        "`dist.all_reduce`: leave that out, because processes of a pipeline do not split the mini-batch as in data "
        "parallelism",
    )


class FirstForwards:
    """Checks the first forward of each stage: that it communicates with no other process of the pipeline."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` is that of the pipeline's processes; None is the default group."""
        self._group = group
        self._seen: set[int] = set()  # stages

    def checked(self, stage: int, module: nn.Module) -> AbstractContextManager[object]:
        """Returns a context for a forward of a stage; it raises `ForwardCommunicates`, and after the first nothing."""
        if stage in self._seen:
            return nullcontext()
        self._seen.add(stage)
        traced = next((part for part in module.modules() if isinstance(part, fx.GraphModule)), module)
        return forwards_checked(traced, self._group)


@contextmanager
def action_checked(layout: ProcessLayout, action: Action) -> Iterator[None]:
    """In this context an action runs, which may call no collective of the default group or of the pipeline's group.

    All processes of the pipeline are in these, and run other actions meanwhile. Such a collective is noticed when it
    has returned, or failed at its timeout: to look at every operator, as in first forwards, would cost too much.

    Raises:
        InvalidModel: the action has called one.
    """
    if len(layout.ranks) == 1 or layout.schedule.num_stages == 1:
        yield
        return
    before = _num_collectives(layout)
    try:
        yield
    except Exception as error:  # of the model's own code, or of a collective that nobody else has called
        if _num_collectives(layout) != before:
            raise _communicates(action) from error
        raise
    if _num_collectives(layout) != before:
        raise _communicates(action)


def _num_collectives(layout: ProcessLayout) -> list[int]:
    """Returns how many collectives this process has called in each group in which a pipeline's processes all are."""
    return [num_collectives(group) for group in {None, layout.group}]


def _communicates(action: Action) -> InvalidModel:
    return InvalidModel(
        f"the {PASSES[action.phase]} of a layer in stage {action.stage} communicates with processes that do not run "
        "it, such as by `dist.all_reduce`: each micro-batch passes through a layer in one process alone, as in "
        "training with one; leave that out"
    )


def _checked(layout: ProcessLayout | None, stage: int, max_elements: int, fault: str) -> AbstractContextManager[object]:
    if layout is None or layout.schedule.num_stages == 1:
        return nullcontext()
    return _CollectivesCheck(_replicas(layout, stage), max_elements, fault)


class _CollectivesCheck(CollectivesMode):
    """Raises BapipeError if code communicates with other processes than the allowed ones."""

    def __init__(self, processes: Collection[int], max_elements: int, fault: str) -> None:
        """`processes` are the allowed global ranks.

        Tensors of at most `max_elements` elements may be sent to others; at -1 no collective with others is allowed.
        `fault` is the text of the error.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._processes, self._max_elements, self._fault = frozenset(processes), max_elements, fault

    def check(self, operator: Any, processes: Sequence[int], num_elements: int) -> None:
        if num_elements > self._max_elements and not self._processes.issuperset(processes):
            raise BapipeError(self._fault)


def _replicas(layout: ProcessLayout, stage: int) -> list[int]:
    """Returns the global ranks of the processes that run a stage."""
    processes = layout.processes_of(sorted(layout.schedule.devices[stage]))
    group = layout.group
    return processes if group is None else [dist.get_global_rank(group, process) for process in processes]
