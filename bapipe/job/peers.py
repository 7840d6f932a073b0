"""Proof that each of gloo's connections leads to a rank of the job: gloo takes the first that connects for its peer."""

import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.job.secret import digest

_CODE_BYTES = 32


def prove_peers(group: dist.ProcessGroup, names: Sequence[str], secret: bytes, timeout: timedelta) -> None:
    """Every rank of a gloo group challenges every other one, over their own connection; all ranks call it together.

    `names` are those of the group's ranks.

    Raises:
        BapipeError: something else than the rank has answered.
        RuntimeError: there was no answer for `timeout`.
    """
    own, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    peers = [place for place in range(len(ranks)) if place != own]
    challenges = {place: secrets.token_bytes(_CODE_BYTES) for place in peers}
    asked = _exchange(group, ranks, challenges, timeout)
    answers = _exchange(group, ranks, {place: _answer(secret, own, place, asked[place]) for place in peers}, timeout)
    for place in peers:
        if not hmac.compare_digest(answers[place], _answer(secret, place, own, challenges[place])):
            raise BapipeError(
                f"the connection of rank {own} ({names[own]}) to rank {place} ({names[place]}) leads to a process that "
                "is not of this job: start it again, and see who may use this network"
            )


def _answer(secret: bytes, source: int, target: int, challenge: bytes) -> bytes:
    return digest(secret, b"peer", str(source).encode(), str(target).encode(), challenge)


def _exchange(
    group: dist.ProcessGroup, ranks: Sequence[int], sent: dict[int, bytes], timeout: timedelta
) -> dict[int, bytes]:
    """Sends a code to each peer; returns what each has sent."""
    received = {place: torch.empty(_CODE_BYTES, dtype=torch.uint8) for place in sent}
    works = [dist.irecv(tensor, ranks[place], group) for place, tensor in received.items()]
    works += [dist.isend(_tensor(code), ranks[place], group) for place, code in sent.items()]
    for work in works:
        assert work is not None  # the group has this rank
        work.wait(timeout)
    return {place: bytes(tensor.tolist()) for place, tensor in received.items()}


def _tensor(code: bytes) -> Tensor:
    return torch.tensor(list(code), dtype=torch.uint8)
