"""State that forwards change in a stage with replicas: running statistics are averaged, other changes are refused."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.module_state.python_state import generator_state, generators_kept, numbers_kept, same_value, tensors_kept
from bapipe.runtime.tensor_changes import TensorChanges
from bapipe.tracing.changing_state import is_read_by_next_forward


def check_changes_of_replicas(stage: int, changed: Iterable[str]) -> None:
    """Raises InvalidModel if forwards of a stage with replicas have `changed` a tensor that is no running statistic.

    The next forward may read it, and would find the changes by this replica's micro-batches alone.
    """
    for name in sorted(changed):
        if is_read_by_next_forward(name):
            raise InvalidModel(with_replicas(f"'{name}' in stage {stage} changes in forwards"))


def with_replicas(what: str) -> str:
    """Returns an error's text: a stage cannot have replicas because of `what` changes in its forwards."""
    return (
        f"{what}, and the stage has replicas, each of which runs only some of the micro-batches, so training would "
        "differ from that in one process: plan without replicas (`replicas`)"
    )


class BufferAverage:
    """Makes the running statistics of a stage's replicas equal after every step.

    In a step each replica's batch norm sees only its own micro-batches. Afterwards each running statistic changes by
    the mean of its changes on the replicas, weighted by their numbers of micro-batches, and each count of batches by
    the sum of its changes. So running statistics follow all of the data, and counts are those of one process. A buffer
    that no replica changes keeps its exact value.
    """

    def __init__(self, stage: int, module: nn.Module, group: dist.ProcessGroup, share: float) -> None:
        """`share` is the share of the micro-batches that this replica runs."""
        self._stage, self._module, self._group, self._share = stage, module, group, share
        self._is_first = True
        self._others = TensorChanges()  # of tensors that are no running statistics
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Copies the running statistics, before a step."""
        statistics, others = self._tensors()
        self._before = {name: buffer.detach().clone() for name, buffer in statistics.items()}
        self._others.begin(others)

    def finish(self) -> None:
        """Makes the buffers equal, after a step.

        Raises:
            InvalidModel: the step changed a buffer or frozen parameter that is no running statistic.
        """
        statistics, others = self._tensors()
        changed = self._others.changed(others)
        check_changes_of_replicas(self._stage, self._on_any_replica(changed, others) if self._is_first else changed)
        self._is_first = False
        for dtype in dict.fromkeys(buffer.dtype for buffer in statistics.values()):
            self._add_changes({name: buffer for name, buffer in statistics.items() if buffer.dtype == dtype})
        self._before = {}

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the running statistics, each once, and the other buffers and frozen parameters, by name.

        They are looked up anew, because a forward may assign buffers. Of the others, one with two names occurs twice.
        """
        frozen = {name: p for name, p in self._module.named_parameters() if not p.requires_grad}
        named = frozen | dict(self._module.named_buffers(remove_duplicate=False))
        others = {name: tensor for name, tensor in named.items() if is_read_by_next_forward(name)}
        return _each_once({name: tensor for name, tensor in named.items() if name not in others}), others

    def _on_any_replica(self, changed: Iterable[str], tensors: Mapping[str, Tensor]) -> frozenset[str]:
        """Returns what has changed on any replica, so that all of them raise the same error."""
        if not tensors:
            return frozenset()
        device = next(iter(tensors.values())).device
        flags = torch.tensor([name in changed for name in tensors], dtype=torch.int32, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return frozenset(name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag)

    @torch.no_grad()
    def _add_changes(self, buffers: Mapping[str, Tensor]) -> None:
        """Applies the changes of all replicas to running statistics of one dtype."""
        before = [self._before[name] for name in buffers]
        pairs = zip(buffers.values(), before, strict=True)
        changes = [
            (now - then) * self._share if now.is_floating_point() else now.long() - then.long() for now, then in pairs
        ]
        flat = torch.cat([change.reshape(-1) for change in changes])
        dist.all_reduce(flat, group=self._group)
        totals = torch.split(flat, [change.numel() for change in changes])
        for buffer, then, total in zip(buffers.values(), before, totals, strict=True):
            buffer.copy_(then + total.view_as(then).to(then.dtype))


class LossOfReplicas:
    """Checks that a loss keeps no values for its next call: each replica of the last stage has a loss of its own."""

    def __init__(self, loss: object) -> None:
        """Values are looked for in the attributes of `loss` and, if it is a module, in those of its submodules."""
        self._loss = loss
        self._tensors = TensorChanges()
        self._values: dict[str, object] = {}

    def begin(self) -> None:
        """Remembers the values that the loss keeps, before a step."""
        self._tensors.begin(tensors_kept(self._loss))
        self._values = self._values_kept()

    def finish(self) -> None:
        """Compares the values that the loss keeps, after a step.

        Raises:
            InvalidModel: a tensor, a number or a random generator of the loss has changed.
        """
        changed = self._tensors.changed(tensors_kept(self._loss))
        now = self._values_kept()
        changed |= {name for name in now.keys() & self._values if not same_value(now[name], self._values[name])}
        for name in sorted(changed):
            raise InvalidModel(with_replicas(f"'{name}' of the loss changes in forwards"))

    def _values_kept(self) -> dict[str, object]:
        generators = generators_kept(self._loss)
        return numbers_kept(self._loss) | {name: generator_state(one) for name, one in generators.items()}


def _each_once(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns each buffer under the first of its names."""
    first: dict[int, str] = {}
    for name, buffer in buffers.items():
        first.setdefault(id(buffer), name)
    return {name: buffers[name] for name in first.values()}
