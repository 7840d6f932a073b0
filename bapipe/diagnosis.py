"""What this machine has for planning, profiling and training, and what will not work here."""

import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from bapipe.errors import BapipeError
from bapipe.formats.cache import cache_folder
from bapipe.hardware import cpu_name, memory_bytes, num_cores
from bapipe.printable import counted

OPTIONAL = {
    "torch": "to profile and train: install bapipe with its extra 'run'",
    "safetensors": "for checkpoints and weights: install bapipe with its extra 'run'",
    "PIL": "for image data: install bapipe with its extra 'run'",
    "ortools": "to improve searched orders: install bapipe with its extra 'search'",
    "tensorboard": "to log for TensorBoard: install bapipe with its extra 'tensorboard'",
    "sentencepiece": "for text data: install bapipe with its extra 'text'",
    "transformers": "for models named hf:CLASS: install transformers",
}
"""Packages that bapipe works without, by module name, and what they are for."""

SHARED_MEMORY = "/dev/shm"
"""The folder of the memory that processes of one machine share."""

MIN_SHARED_MEMORY = 2**28
"""Bytes of it below which processes of one machine may fail to exchange tensors."""

LOOPBACK_BYTES = 2**26
"""How much is sent to see how fast the loopback interface is: a twentieth of a second or so."""

MIN_DISK = 2**30
"""Bytes free for the cache below which profiles and plans may not be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact about this machine.

    Attributes:
        advice: what does not work, and what to do; empty if there is nothing to do.
    """

    name: str
    value: str
    advice: str = ""


def diagnose() -> Iterator[Finding]:
    """Yields the facts, in the order in which a user needs them: software, devices, memory, disk."""
    yield Finding(name="bapipe", value=version("bapipe"))
    yield Finding(name="python", value=f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _packages()
    yield Finding(name="cpu", value=f"{cpu_name()}, {counted(num_cores(), 'core')} for this process")
    yield _load()
    yield Finding(name="memory", value=f"{memory_bytes() / 2**30:.1f} GiB")
    yield _threads()
    yield _loopback()
    if find_spec("torch") is not None:
        yield from _torch()
    yield from _disk()


def _packages() -> Iterator[Finding]:
    for module, purpose in OPTIONAL.items():
        if find_spec(module) is None:
            yield Finding(name=module, value="not installed", advice=purpose)
            continue
        try:
            yield Finding(name=module, value=version("pillow" if module == "PIL" else module))
        except PackageNotFoundError:
            yield Finding(name=module, value="installed, version unknown")


def _load() -> Finding:
    load = os.getloadavg()[0]
    busy = load > 0.5 * num_cores()
    advice = "other programs are running: profile when the machine is idle, or times will be too long" if busy else ""
    return Finding(name="load", value=f"{load:.1f} on average in the last minute", advice=advice)


def _threads() -> Finding:
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or threads == "1":
        return Finding(name="OMP_NUM_THREADS", value=threads or "not set")
    advice = "each rank sets its own number of threads; the variable changes libraries that torch calls: unset it"
    return Finding(name="OMP_NUM_THREADS", value=threads, advice=advice)


def loopback_bytes_per_s() -> float:
    """Returns how fast a thread of this process receives from another one through TCP on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            begin, left, buffer = time.perf_counter(), LOOPBACK_BYTES, bytearray(2**20)
            thread = threading.Thread(target=sender.sendall, args=(bytes(LOOPBACK_BYTES),))
            thread.start()
            while left > 0 and (received := receiver.recv_into(buffer)):
                left -= received
            thread.join()
            return LOOPBACK_BYTES / (time.perf_counter() - begin)


def _loopback() -> Finding:
    try:
        value, advice = f"{loopback_bytes_per_s() / 1e9:.1f} GB/s through TCP, without a rank's own work", ""
    except OSError as error:
        value = f"cannot be used: {error.strerror}"
        advice = "ranks of this machine cannot communicate: allow connections to 127.0.0.1"
    return Finding(name="loopback", value=value, advice=advice)


def _torch() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    yield _cuda_devices(count)
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        name="gloo",
        value="available" if gloo else "not available",
        advice="" if gloo else "ranks on CPUs cannot communicate: install a torch that has it",
    )
    nccl = dist.is_available() and dist.is_nccl_available()
    missing = "GPUs cannot communicate: install a torch that has it" if count > 1 and not nccl else ""
    yield Finding(name="nccl", value="available" if nccl else "not available", advice=missing)


def _cuda_devices(count: int) -> Finding:
    import torch

    from bapipe.torch_device import start_cuda

    if count == 0:
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        return Finding(name="cuda devices", value=f"none; {built}", advice="models are profiled and trained on the CPU")
    try:
        start_cuda()
    except BapipeError as error:
        return Finding(name="cuda devices", value=f"{count}, which cannot be used", advice=str(error))
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return Finding(name="cuda devices", value=f"{count}: {names}")


def _disk() -> Iterator[Finding]:
    if os.path.isdir(SHARED_MEMORY) and not os.access(SHARED_MEMORY, os.W_OK):
        advice = "data workers cannot start, and GPUs of one machine may fail to exchange tensors: let this user write"
        yield Finding(name=SHARED_MEMORY, value="not writable", advice=f"{advice} there")
    elif os.path.isdir(SHARED_MEMORY):
        free = shutil.disk_usage(SHARED_MEMORY).free
        advice = "ranks of one machine may fail to exchange tensors: make it larger" if free < MIN_SHARED_MEMORY else ""
        yield Finding(name=SHARED_MEMORY, value=f"{free / 2**30:.1f} GiB free", advice=advice)
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield Finding(
            name="cache", value=f"{folder}: not writable", advice="set XDG_CACHE_HOME to a folder that can be written"
        )
        return
    free, used = shutil.disk_usage(existing).free, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    advice = "profiles and plans may not be kept: free some space" if free < MIN_DISK else ""
    value = f"{folder}: {used / 2**20:.0f} MiB used, {free / 2**30:.1f} GiB free"
    yield Finding(name="cache", value=value, advice=advice)
