"""Proof that each of gloo's connections leads to a rank of the job: gloo takes the first that connects for its peer."""

import hmac
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.job.secret import digest
from bapipe.torch_device import CPU

_CODE_BYTES = 32


def prove_peers(group: dist.ProcessGroup, names: Sequence[str], secret: bytes, timeout: timedelta) -> None:
    """Every rank of a gloo group challenges every other one, over their own connection; all ranks call it together.

    `names` are those of all ranks of the default group.

    Raises:
        BapipeError: something else than the rank has answered, or nothing for `timeout`.
        RuntimeError: a connection was closed.
    """
    own, begin_s = dist.get_rank(), time.monotonic()
    peers = [rank for rank in dist.get_process_group_ranks(group) if rank != own]
    challenges = {peer: secrets.token_bytes(_CODE_BYTES) for peer in peers}
    try:
        asked = _exchange(group, challenges, timeout)
        own_answers = {peer: _answer(secret, group, own, peer, asked[peer]) for peer in peers}
        answers = _exchange(group, own_answers, timeout)
    except RuntimeError:
        waited_s = time.monotonic() - begin_s
        if waited_s < timeout.total_seconds():
            raise
        others = ", ".join(f"rank {peer} ({names[peer]})" for peer in peers)
        raise BapipeError(
            f"rank {own} ({names[own]}) is connected to {others}, but has no answer after {waited_s:.0f} s: one of "
            "them hangs, or a process that is not of this job is in its place; start the job again"
        ) from None
    for peer in peers:
        if not hmac.compare_digest(answers[peer], _answer(secret, group, peer, own, challenges[peer])):
            raise BapipeError(
                f"the connection of rank {own} ({names[own]}) to rank {peer} ({names[peer]}) leads to a process that "
                "is not of this job: start it again, and see who may use this network"
            )


def _answer(secret: bytes, group: dist.ProcessGroup, source: int, target: int, challenge: bytes) -> bytes:
    """Returns the answer to a challenge; with the group's name, as a stranger could pass on one group's in another."""
    return digest(secret, b"peer", group.group_name.encode(), str(source).encode(), str(target).encode(), challenge)


def _exchange(group: dist.ProcessGroup, sent: dict[int, bytes], timeout: timedelta) -> dict[int, bytes]:
    """Sends a code to each rank; returns what each has sent."""
    received = {rank: torch.empty(_CODE_BYTES, dtype=torch.uint8, device=CPU) for rank in sent}
    works = [dist.irecv(tensor, rank, group) for rank, tensor in received.items()]
    works += [dist.isend(_tensor(code), rank, group) for rank, code in sent.items()]
    for work in works:
        assert work is not None  # the group has this rank
        work.wait(timeout)
    return {rank: bytes(tensor.tolist()) for rank, tensor in received.items()}


def _tensor(code: bytes) -> Tensor:
    return torch.tensor(list(code), dtype=torch.uint8, device=CPU)
