"""The transfers of a rank: sends and receives that have been posted, and the process groups that carry them.

torch's runtime would keep all sends, and so their tensors, until the step ends. It would also post all of a rank's
transfers in one process group, in which NCCL runs those between two ranks one after another, whatever their direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from bapipe.job.groups import wait
from bapipe.job.lost_peer import waiting_for
from bapipe.runtime.call_order import CallOrder
from bapipe.runtime.lowering import End, Transfer, receive_of
from bapipe.schedules.table import Action, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The process groups that carry tensors from one process to another; None is the default group.

    Attributes:
        process: the rank of this process in the layout's group.
        ascending: the group of transfers to a process with a higher rank.
        descending: the group of all other transfers.
        calls: the pipeline's, of which the last one exchanges the tensors.
    """

    process: int
    ascending: dist.ProcessGroup | None
    descending: dist.ProcessGroup | None
    calls: CallOrder

    def begin(self) -> None:
        """Notes that from here on a call exchanges tensors."""
        self.calls.is_under_way = True

    def send(self, tensor: Tensor, target: int) -> dist.Work:
        """Posts a send to a process."""
        group = self.ascending if target > self.process else self.descending
        with waiting_for(f"process {target}"):
            return _posted(dist.isend(tensor, group=group, group_dst=target, tag=self.calls.tag))

    def receive(self, tensor: Tensor, source: int) -> dist.Work:
        """Posts a receive from a process."""
        group = self.ascending if source < self.process else self.descending
        with waiting_for(f"process {source}"):
            return _posted(dist.irecv(tensor, group=group, group_src=source, tag=self.calls.tag))

    def wait(self, work: dist.Work, process: int) -> None:
        """Waits for a send to a process, or a receive from it, that was posted."""
        with waiting_for(f"process {process}"):
            wait(work, self.ascending)  # both groups have the same timeout


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this process is in the group
    return work


class Transfers:
    """The transfers of a step, or of an evaluation, that have been posted, each until it is known to be done.

    A send's work keeps its tensors alive. With gloo, waiting for a work returns when it is done. With NCCL only the
    current stream waits, not this process. The caching allocator reuses the memory of a sent tensor only when this
    process finds that NCCL's stream has sent it (`record_stream`), so memory of sends that the host has launched ahead
    stays in use.
    """

    def __init__(self, channels: Channels, finished_before: Mapping[Action, Sequence[Transfer]]) -> None:
        """`finished_before` are the sends that are to be done before an action starts, such as `finished_sends`."""
        self._channels, self._finished_before = channels, finished_before
        self._posted: dict[Transfer, Sequence[tuple[dist.Work, int]]] = {}  # those not waited for yet, with the process

    def post(self, transfer: Transfer, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Posts the sends or receives of a transfer: of tensors, each with the process at the other end."""
        post = self._channels.send if transfer.end is End.SEND else self._channels.receive
        self._posted[transfer] = [(post(tensor, process), process) for tensor, process in tensors]

    def before(self, action: Action) -> None:
        """Waits for what an action receives; then waits for, and forgets, the sends to be done before it."""
        receives = () if action.phase is Phase.WEIGHT_GRAD else (receive_of(action),)
        for transfer in (*receives, *self._finished_before.get(action, ())):
            self._release(transfer)

    def release_all(self) -> None:
        """Waits for, and forgets, the sends that are left at the end of a step."""
        for transfer in tuple(self._posted):
            self._release(transfer)

    def _release(self, transfer: Transfer) -> None:
        for work, process in self._posted.pop(transfer, ()):
            self._channels.wait(work, process)
