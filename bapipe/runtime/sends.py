"""The sends of a rank: torch's runtime would keep all of them, and so their tensors, until the step ends."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from bapipe.schedules.table import Action
from bapipe.torch_private import post_sends


class Sends:
    """The sends of a step that have been posted, by name, each until it is known to be done.

    A work holds its tensors. With gloo, waiting for it returns when they have been sent. With NCCL, only the current
    stream waits for the send, not this process; the caching allocator then gives their memory to kernels of that stream
    alone, which run after the send.
    """

    def __init__(self, finished_before: Mapping[Action, Sequence[str]]) -> None:
        """`finished_before` are the sends that are certainly done before an action starts, as by `finished_sends`."""
        self._finished_before = finished_before
        self._posted: dict[str, Sequence[dist.Work]] = {}

    def post(self, name: str, operations: Sequence[dist.P2POp]) -> None:
        """Posts the sends of an action's output."""
        self._posted[name] = post_sends(operations)

    def release_before(self, action: Action) -> None:
        """Waits for, and forgets, what is done when an action has all its inputs."""
        for name in self._finished_before.get(action, ()):
            self._wait(name)

    def release_all(self) -> None:
        """Waits for, and forgets, what is left at the end of a step."""
        for name in tuple(self._posted):
            self._wait(name)

    def _wait(self, name: str) -> None:
        for work in self._posted.pop(name):
            work.wait()
