"""Workers of test_launch.py and test_train.py that end well or badly, and a parent to be interrupted."""

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from bapipe.errors import BapipeError
from bapipe.job import groups
from bapipe.job.groups import _JOBS, init_proven_group, new_proven_group
from bapipe.job.sockets import open_sockets
from bapipe.runtime.optimizer_state import OptimizerState
from bapipe.torch_private.process_groups import backend_name
from bapipe.training.checkpoint import tensor_files, writer
from bapipe.training.checkpoint.manifest import Manifest, MinibatchSize, position_after
from bapipe.training.data import workers
from bapipe.training.launch.processes import launch
from bapipe.training.launch.worker import Rank
from bapipe.zoo.data.dataset import as_pipeline_dataset
from bapipe.zoo.example import Example


def both(rank: Rank, how: str) -> int:
    """Rank 1 ends as `how` says at step 3, while rank 0 waits for it."""
    for step in range(4):
        rank.enter_step(step)
        rank.report((step, os.getpid()))
        dist.barrier()
    if rank.index == 1:
        _end(how)
    dist.barrier()
    return rank.index


def _end(how: str) -> None:
    if how == "raise":
        raise RuntimeError("first line\nsecond line")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(5)
    if how == "hang":
        time.sleep(1000)


def three_steps(rank: Rank, folder: str) -> tuple[str, list[str]]:
    """Rank 0 waits for rank 1 in each of three steps.

    Returns what a group said whose ranks have different secrets, and what became of jobs that strangers attacked.
    """
    new_proven_group(None, timedelta(seconds=60))
    said, everyone = "", dist.group.WORLD
    assert everyone is not None
    _JOBS[everyone] = replace(_JOBS[everyone], secret=b"of rank %d" % rank.index)
    try:
        new_proven_group(None, timedelta(seconds=60))
    except BapipeError as error:
        said = str(error)
    for step in range(3):
        rank.enter_step(step)
        rank.report((step, os.getpid(), _ports()))
        time.sleep(rank.index)
        dist.barrier()
    return said, [attacked(rank, f"{folder}/{behaviour}", behaviour) for behaviour in BEHAVIOURS]


def talkative(rank: Rank) -> int:
    """Reports more than a pipe holds, while the ranks wait for one another."""
    for step in range(40):
        rank.enter_step(step)
        rank.report(bytes(10_000))
        dist.barrier()
    return rank.index


def waits_for_a_tensor(rank: Rank) -> None:
    """Rank 0 waits for a tensor of rank 1, which hangs."""
    rank.enter_step(3)
    if rank.index == 1:
        _end("hang")
    groups.wait(dist.irecv(torch.zeros(1), 1))


def waits_after_its_own_work(rank: Rank) -> None:
    """Rank 0 waits for rank 1, which hangs, after two seconds of its own."""
    rank.enter_step(3)
    if rank.index == 1:
        _end("hang")
    time.sleep(2)
    dist.barrier()


def writes_a_checkpoint(rank: Rank, folder: str, disk: str) -> None:
    """Rank 1 writes its file to a disk that is `slow`, and rank 0 the rest; or rank 1 is `frozen` meanwhile."""

    def sync(_: Path) -> None:
        if disk == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(2.5)

    size = (MinibatchSize(from_step=0, num_samples=4),)
    manifest = Manifest(
        model="model", optimizer="sgd", seed=0, num_samples=8, minibatch_sizes=size, plan=None, versions={}, files={},
        position=position_after(1, size, 8), tensors={}, optimizer_tensors={}, optimizer_numbers={},
    )  # fmt: skip
    names, nothing = ("cpu0", "cpu1"), OptimizerState(tensors={}, numbers={})
    note = rank.note_meeting
    checkpoints = writer.CheckpointWriter(Path(folder), 3, rank.group_timeout, names, rank.device, on_meeting=note)
    rank.enter_step(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer if rank.index == 0 else tensor_files, "sync", sync)
        checkpoints.save(manifest, {f"weight{rank.index}": torch.ones(2)}, {}, nothing, ())
        checkpoints.wait()


def late_sender(rank: Rank) -> list[tuple[str, float]]:
    """Rank 0 sends later than connecting may take, in a group as it is and in one that torch checks.

    Returns the backend of each group, and the number in place of 0 that this rank has then.
    """
    results = []
    for level in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL):
        dist.set_debug_level(level)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(groups, "PATIENCE", [timedelta(seconds=seconds) for seconds in (1, 20, 20)])
            group = new_proven_group(None, timedelta(seconds=60))
        number = torch.zeros(1)
        if rank.index == 0:
            time.sleep(1.5)
            groups.wait(dist.isend(number + 7, 1, group), group)
        else:
            groups.wait(dist.irecv(number, 0, group), group)
        results.append((backend_name(group, number.device), number.item()))
    return results


BEHAVIOURS = ("closes", "is silent", "attacks the second group", "attacks at every attempt")
"""What strangers do once they have taken the places of ranks."""


class Attacked(dist.Store):
    """A store shared by a file. When gloo tells its address there, strangers connect to it, before any rank can."""

    def __init__(self, path: str, size: int, groups: Collection[int], behaviour: str) -> None:
        super().__init__()
        self._inner, self._groups, self._closes = dist.FileStore(path, size), groups, behaviour == "closes"
        self._strangers: list[socket.socket] = []
        self._known, self._num_groups = set(_ports()), 0

    def set(self, key: str, value: str) -> None:
        new, self._known = set(_ports()) - self._known, self._known | set(_ports())
        for port in new:
            for place in range(4 if self._num_groups in self._groups else 0):
                self._strangers.append(socket.create_connection(("127.0.0.1", port), timeout=20))
                self._strangers[-1].sendall(struct.pack("<Q", place))  # gloo's whole greeting
                if self._closes:
                    self._strangers[-1].close()
            self._num_groups += 1
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._inner.wait(keys, timeout)


def attacked(rank: Rank, path: str, behaviour: str) -> str:
    """Returns what the ranks of a job and of a group in it have summed, or why it failed."""
    dist.destroy_process_group()
    number = BEHAVIOURS.index(behaviour)
    rank.enter_step(3 + number)
    store = Attacked(path, rank.size, ({0}, {0}, {1}, range(9))[number], behaviour)
    given = [timedelta(seconds=seconds) for seconds in ((0.5, 0.5, 0.5) if number == 3 else (0.5, 20, 20))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "PATIENCE", given)
        try:
            init_proven_group("cpu", store, rank.index, ("cpu0", "cpu1"), b"known to ranks", timedelta(seconds=60))
        except BapipeError as error:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for who closes it
            return str(error)
        total = torch.ones(1)
        dist.all_reduce(total, group=new_proven_group(None, timedelta(seconds=60)))
        dist.all_reduce(total)
        return str(total.item())


def _ports() -> list[int]:
    """Returns the ports of this process that listen."""
    ports = []
    for handle, _ in open_sockets():
        with socket.socket(fileno=os.dup(handle)) as opened:
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.append(opened.getsockname()[1])
    return ports


def alone(rank: Rank) -> None:
    """Refused by every rank at once."""
    raise BapipeError(f"not on {rank.device}")


@dataclass(frozen=True)
class SlowData(Dataset[Tensor]):
    """A data set that is slow to load."""

    is_slow_to_load = True

    def __len__(self) -> int:
        return 0


def default_workers(rank: Rank) -> int:
    """Returns how many processes load data for a rank of a machine with 16 cores, by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "num_cores", lambda: 16)
        data = as_pipeline_dataset(SlowData())
        return workers.num_data_workers(None, data, on_gpu=False, num_ranks=1, num_threads=1, batch_bytes=1)


def hang(rank: Rank, folder: str) -> None:
    rank.enter_step(0)
    with open(os.path.join(folder, f"{rank.index}.pid"), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)


def classifier(module: nn.Module) -> Example:
    """A module that scores three classes of points, and how to train it."""
    return Example(
        module=module,
        inputs=(torch.zeros(1, 4),),
        target=torch.zeros(1, dtype=torch.int64),
        loss=nn.functional.cross_entropy,
    )


def small() -> Example:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return classifier(module)


def _num_threads(output: Tensor, _: Tensor) -> Tensor:
    return output.sum() * 0 + torch.get_num_threads()


def counting() -> Example:
    """The same, with the number of compute threads as its loss."""
    return replace(small(), loss=_num_threads)


class _IsTraining(nn.Module):
    """Gives 2 in training mode, and 1 in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + (2.0 if self.training else 1.0)


def in_evaluation_mode() -> Example:
    """A model as libraries load it; its loss tells the mode."""
    return replace(small(), module=nn.Sequential(nn.Linear(4, 3, device="meta"), _IsTraining()).eval(), loss=_mean)


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def clusters() -> Dataset[tuple[Tensor, ...]]:
    """Three clusters of points and which one each point is of."""
    torch.manual_seed(0)
    labels = torch.arange(40) % 3
    return TensorDataset(torch.randn(40, 4) * 0.1 + labels[:, None], labels)


if __name__ == "__main__":  # a parent for SIGINT and SIGKILL
    try:
        launch(hang, ["cpu0", "cpu1"], sys.argv[1], timeout_s=100)
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(130)
