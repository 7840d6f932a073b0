"""Processes that train the same model meanwhile, as ranks on a machine's other cores do when a plan runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bapipe._optional import require_torch
from bapipe.errors import BapipeError
from bapipe.hardware import num_cores


@contextmanager
def neighbours(num: int, factory: str, arguments: Mapping[str, object], microbatch_size: int) -> Iterator[None]:
    """Runs F and B of a model in some other processes of one thread each, over and over, until it is left.

    Raises:
        BapipeError: this machine has no cores for them, or one ended early.
    """
    if num and num >= num_cores():
        raise BapipeError(
            f"{num} neighbours and the measuring itself want {num + 1} cores; this machine has {num_cores()}"
        )
    what = json.dumps([factory, dict(arguments), microbatch_size, os.getpid()])
    started = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(num)
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stderr is not None
            if not one.stdout.readline():  # it says a word when it trains
                lines = one.stderr.read().strip().splitlines()
                raise BapipeError(f"a neighbour cannot train the model: {lines[-1] if lines else 'it said nothing'}")
        yield
    finally:
        for one in started:
            one.kill()
            one.communicate()


def _train(factory: str, arguments: Mapping[str, object], microbatch_size: int, parent: int) -> None:
    torch = require_torch()
    from bapipe.torch_device import prepare_cpu
    from bapipe.tracing.sizes import repeat_to_batch
    from bapipe.zoo.factory import build

    prepare_cpu(1)
    example = build(factory, arguments)
    *inputs, target = (
        repeat_to_batch(one, microbatch_size, torch.device("cpu")) for one in (*example.inputs, example.target)
    )
    sys.stdout.write("training\n")
    sys.stdout.flush()
    while os.getppid() == parent:
        example.loss(example.module(*inputs), target).backward()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    _train(*json.loads(sys.argv[1]))
