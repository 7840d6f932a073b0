"""Checkpoints of short runs in this process, to be damaged."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bapipe.formats.plan import Plan
from bapipe.training.checkpoint.manifest import MANIFEST
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import TrainResult
from bapipe.zoo.example import Example
from tests.multiprocess.fault_cases import plan_of, points, quiet


@contextmanager
def only_rank() -> Iterator[None]:
    """This process as the only one of a job of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    with patch.dict(os.environ, {name: str(value) for name, value in given.items()}):
        yield


@cache
def plan() -> Plan:
    return plan_of(quiet, (), (0,))


@cache
def example() -> Example:
    return quiet()


def go(folder: Path, steps: int, **options: Any) -> TrainResult:
    """Trains to a step, with a checkpoint after every second; resumes if there is one."""
    config = TrainConfig(steps=steps, optimizer="adam", checkpoint=folder, checkpoint_every=2, resume=True, **options)
    with only_rank():
        return train(plan(), quiet, points(), config, example=example())


def write_manifest(checkpoint: Path, tree: Any) -> None:
    """Writes a manifest with the digest of what it holds."""
    empty = json.dumps(tree | {"digest": ""}, separators=(",", ":"), ensure_ascii=False).encode()
    text = json.dumps(tree | {"digest": hashlib.sha256(empty).hexdigest()}, separators=(",", ":"), ensure_ascii=False)
    (checkpoint / MANIFEST).write_text(text)


def read_tree(checkpoint: Path) -> Any:
    return json.loads((checkpoint / MANIFEST).read_text())
