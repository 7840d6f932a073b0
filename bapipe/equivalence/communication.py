"""Stops code that communicates with other processes, which would wait for those that never run it."""

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from bapipe.errors import InvalidModel
from bapipe.torch_private.process_groups import name_of_collective, processes_of_collective
from bapipe.torch_private.tensors import DispatchMode, tree_tensors


class ForwardCommunicates(InvalidModel):
    """The forward of a layer communicates with other processes."""


def forwards_checked(module: nn.Module, group: dist.ProcessGroup | None = None) -> AbstractContextManager[object]:
    """Returns a context for forwards of a module, which raises if one communicates with other processes of a group.

    A collective is called by all processes of its group. Of those that run a pipeline only one runs a layer on a
    micro-batch, so that the others would never call it. Groups without them may be used, as those of layers that are
    split over processes.

    Args:
        module: names the layers in errors, by their paths in it.
        group: None is the default group, of all processes.

    Raises:
        ForwardCommunicates: from the context, a forward does.
    """
    if not dist.is_initialized():
        return nullcontext()
    refused = frozenset(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    return _ForwardsCheck(module, refused) if refused else nullcontext()


class CollectivesMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Calls `check` before code communicates with other processes."""

    supports_higher_order_operators = True  # such as `torch.cond`; what runs in them is not looked at

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns True, so that functions compiled by torch.compile stay compiled in this mode."""
        return True

    def check(self, operator: Any, processes: Sequence[int], num_elements: int) -> None:
        """Raises an error if an operator may not be called.

        `processes` are the global ranks of the processes that call it together, and the largest of its tensors has
        `num_elements`.
        """
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        processes = processes_of_collective(func, args)
        if processes is not None:
            self.check(func, processes, max((tensor.numel() for tensor in tree_tensors(args)), default=0))
        return func(*args, **(kwargs or {}))


class _ForwardsCheck(CollectivesMode):
    """Raises `ForwardCommunicates` if a forward of a module communicates with some of the processes in `refused`."""

    def __init__(self, module: nn.Module, refused: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths, self._refused = {id(part): path for path, part in module.named_modules()}, frozenset(refused)

    def check(self, operator: Any, processes: Sequence[int], num_elements: int) -> None:
        if not self._refused.isdisjoint(processes):
            path = _innermost(self._paths, sys._getframe())
            raise ForwardCommunicates(_in_words(path, name_of_collective(operator)))


def _in_words(path: str, collective: str) -> str:
    where = f"the forward of layer '{path}'" if path else "the model's own forward, or its loss,"
    return (
        f"{where} communicates with other processes ({collective}) and would wait for them for ever: each micro-batch "
        "passes through a layer in one process alone, as in training with one; leave that out"
    )


def _innermost(paths: Mapping[int, str], frame: FrameType | None) -> str:
    """Returns the path of the innermost module that a frame runs in; empty if in none below the model itself."""
    while frame is not None:
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None:
            return path
        frame = frame.f_back
    return ""
