"""Processes that train the same model while it is measured, as ranks on a machine's other cores do when a plan runs."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bapipe._optional import require_torch
from bapipe.errors import BapipeError
from bapipe.hardware import num_cores
from bapipe.processes import ChildError, LocalProcess, local_processes, receive

if TYPE_CHECKING:
    from bapipe.zoo.factory import Factory


@contextmanager
def co_runners(
    num: int, factory: "Factory", arguments: Mapping[str, object], microbatch_size: int
) -> Iterator[Callable[[], None]]:
    """Within the context, other processes of one thread each repeat F and B of a model.

    Its value is a function that raises BapipeError if one has ended: what was measured since then was measured beside
    fewer co-runners.

    Raises:
        BapipeError: this machine has too few cores for them, or one could not begin.
    """
    if not num:
        yield lambda: None
        return
    if num >= num_cores():
        raise BapipeError(
            f"{num} co-runners and the measuring process need {num + 1} cores; this machine has {num_cores()}"
        )
    job = factory, dict(arguments), microbatch_size
    with (
        tempfile.TemporaryDirectory(prefix="bapipe-") as folder,
        local_processes(_train, num, job, folder=Path(folder), quiet=True) as processes,
    ):
        _wait_until_training(processes)
        yield lambda: _check_running(processes)


def _wait_until_training(processes: tuple[LocalProcess, ...]) -> None:
    waiting = {process.index for process in processes}
    while waiting:
        for process, message in receive(processes, timeout_s=1.0):
            if not process.is_open or isinstance(message, ChildError):
                raise BapipeError(f"a co-runner cannot train the model: {_why_ended(process, message)}")
            waiting.discard(process.index)


def _check_running(processes: tuple[LocalProcess, ...]) -> None:
    for process, message in receive(processes, timeout_s=0.0):
        raise BapipeError(
            f"a co-runner has ended while layers were measured: {_why_ended(process, message)}; measure again, if "
            "memory is scarce with fewer co-runners"
        )


def _why_ended(process: LocalProcess, message: object) -> str:
    return message.text if isinstance(message, ChildError) else process.why_ended()


def _train(
    index: int,
    send: Callable[[object], None],
    factory: "Factory",
    arguments: Mapping[str, object],
    microbatch_size: int,
) -> None:
    require_torch()
    from bapipe.torch_device import CPU, prepare_cpu
    from bapipe.tracing.bound_inputs import only_tensor_inputs
    from bapipe.tracing.sizes import repeat_to_batch
    from bapipe.zoo.factory import build

    prepare_cpu(1)
    example = build(factory, arguments)
    with only_tensor_inputs(example.module, example.inputs) as tensors:
        *inputs, target = (repeat_to_batch(tensor, microbatch_size, CPU) for tensor in (*tensors, example.target))
        send("training")
        while True:  # until the parent leaves the context, or dies
            example.loss(example.module(*inputs), target).backward()  # type: ignore[no-untyped-call]
