"""Refuses optimizers and losses that communicate with processes of other stages, which hold other layers."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.torch_private.process_groups import processes_of_collective
from bapipe.torch_private.tensors import DispatchMode, tree_leaves

MAX_NUMBERS = 8
"""How many numbers an optimizer may exchange with all processes at once, or one for each parameter if these are more.
"""


def optimizer_checked(layout: ProcessLayout | None, stage: int, num_parameters: int) -> AbstractContextManager[object]:
    """Returns a context in which a stage's optimizer may exchange tensors with the replicas of the stage alone.

    One that is made for data parallelism, such as ZeroRedundancyOptimizer, would mix the layers of different stages.
    Some numbers, or one for each of its parameters, may be exchanged with all, such as norms. Without a `layout`
    nothing is checked.
    """
    return _checked(
        layout,
        stage,
        max(num_parameters, MAX_NUMBERS),
        "the optimizer exchanges gradients or weights with processes that run other stages, as those do that are made "
        "for data parallelism (ZeroRedundancyOptimizer): layers of different stages would be mixed; use the optimizer "
        "for one process, as gradients of replicas are summed before it runs",
    )


def loss_checked(layout: ProcessLayout, stage: int) -> AbstractContextManager[object]:
    """Returns a context in which the loss may communicate with the replicas of its stage alone: others never call it.

    Without this both would wait for each other until the timeout.
    """
    return _checked(
        layout,
        stage,
        -1,
        "the loss communicates with processes that run other stages, which do not compute it, as by `dist.all_reduce`: "
        "leave that out, as the processes of a pipeline do not share the mini-batch as those of data parallelism do",
    )


def _checked(layout: ProcessLayout | None, stage: int, max_elements: int, fault: str) -> AbstractContextManager[object]:
    if layout is None or layout.schedule.num_stages == 1:
        return nullcontext()
    return _CollectivesCheck(_replicas(layout, stage), max_elements, fault)


class _CollectivesCheck(DispatchMode):
    """Raises BapipeError where code communicates with others than some processes by more than a few numbers."""

    def __init__(self, processes: Collection[int], max_elements: int, fault: str) -> None:
        """`processes` are global ranks; of at most `max_elements` numbers a tensor may be sent to others."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._processes, self._max_elements, self._fault = frozenset(processes), max_elements, fault

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Lets code that is compiled by torch.compile stay so in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        processes = processes_of_collective(func, args)
        if processes is not None and not self._processes.issuperset(processes):
            tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            if max((tensor.numel() for tensor in tensors), default=0) > self._max_elements:
                raise BapipeError(self._fault)
        return func(*args, **(kwargs or {}))


def _replicas(layout: ProcessLayout, stage: int) -> list[int]:
    """Returns the global ranks of the processes that run a stage."""
    processes = layout.processes_of(sorted(layout.schedule.devices[stage]))
    group = layout.group
    return processes if group is None else [dist.get_global_rank(group, process) for process in processes]
