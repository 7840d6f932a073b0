"""The devices of this machine as torch sees them: number, names and memory, and settings for repeatable times."""

import ctypes
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, first_line
from bapipe.formats.profile import DeviceKind
from bapipe.hardware import cpu_name, memory_bytes, num_cores
from bapipe.torchrun import current_job

CPU = torch.device("cpu")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt
_KEEPING_ALL = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
_BY_DEFAULT = ((_M_MMAP_MAX, 2**16), (_M_MMAP_THRESHOLD, 2**25), (_M_TRIM_THRESHOLD, 2**26))
"""What glibc comes to by itself where large blocks are freed: once one of them was set, it changes none any more."""


def prepare_cpu(num_threads: int) -> None:
    """Fixes the number of compute threads of this process, and makes it keep the memory that it frees.

    By default glibc returns large freed blocks to the kernel, so every weight gradient of 100 MB costs 25,000 page
    faults per micro-batch.
    """
    torch.set_num_threads(num_threads)
    _set_malloc(_KEEPING_ALL)


@contextmanager
def prepared_cpu(num_threads: int) -> Iterator[None]:
    """Does as `prepare_cpu` in this context; afterwards threads are as before, and memory is returned by default."""
    before = torch.get_num_threads()
    prepare_cpu(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _set_malloc(_BY_DEFAULT)


def _set_malloc(options: Iterable[tuple[int, int]]) -> None:
    """Sets options of the C library's malloc, if that is glibc's."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in options:
            libc.mallopt(option, value)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as profiles write it, such as float32."""
    return str(dtype).removeprefix("torch.")


def num_devices(kind: str) -> int:
    """Returns the number of devices of a kind that torch can use here; of `cpu` the cores that this process may use."""
    if kind == "cuda":
        return torch.cuda.device_count()
    return num_cores() if kind == "cpu" else 0


def local_device(device: torch.device | str) -> torch.device:
    """Returns the device of this machine with a name such as cpu, cuda or cuda:1; a CUDA device with its index.

    Raises:
        BapipeError: another kind of device, or one that this machine, or its torch, does not have; or CUDA does not
            start, as with a driver that is too old.
    """
    name = str(device)
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not re.fullmatch("[0-9]{0,9}", index):
        raise BapipeError(f"`device` is '{name}': want cpu or cuda")
    if kind == "cuda" and torch.cuda.device_count() <= int(index or 0):
        raise BapipeError(f"torch finds no device '{name}' on this machine: choose `device` cpu, or {_cuda_advice()}")
    if kind == "cuda":
        start_cuda()
        return torch.device(kind, int(index) if index else torch.cuda.current_device())
    return torch.device(name)


def _cuda_advice() -> str:
    """Returns what lets torch find a CUDA device, or another one."""
    if torch.version.cuda is None:
        return "install torch for CUDA"
    if num := torch.cuda.device_count():
        return f"one of the {num} that it finds, cuda:0 to cuda:{num - 1}"
    try:
        start_cuda()
    except BapipeError as error:
        return str(error)
    return "see what nvidia-smi lists"


def start_cuda() -> None:
    """Raises BapipeError if CUDA does not start: a driver counts GPUs also for a torch for which it is too old."""
    start: Callable[[], None] = torch.cuda.init  # which torch leaves without types
    try:
        start()
    except (AssertionError, RuntimeError) as error:
        raise BapipeError(
            f"update the driver of the GPU, or install torch for its version of CUDA: CUDA {torch.version.cuda} does "
            f"not start ({first_line(error)})"
        ) from error


def current_device(device: torch.device | str) -> torch.device:
    """Returns a device of this machine; a CUDA device becomes this process's current one, which many functions act on.

    Raises:
        BapipeError: another kind of device, or one that this machine, or its torch, does not have; or CUDA does not
            start, as with a driver that is too old.
    """
    found = local_device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def visible_place(place: int) -> int:
    """Returns the number that torch has here for the CUDA device at a place among those of its host.

    Slurm and containers may show each process of a job its own device only.
    """
    job = current_job()
    return 0 if job is not None and job.size > 1 and torch.cuda.device_count() == 1 else place


def move_tensors(module: object, device: torch.device) -> list[tuple[torch.Tensor, torch.device]]:
    """Moves the parameters and buffers of a module, if it is one, to a device; returns those moved, and from where.

    They stay the same objects, which others may hold. The constants of a traced module are its buffers. What is on the
    meta device stays there: its values are elsewhere.
    """
    if not isinstance(module, torch.nn.Module):
        return []
    held = (*module.parameters(), *module.buffers())
    moved = [(tensor, tensor.device) for tensor in held if tensor.device != device and not tensor.is_meta]
    for tensor, _ in moved:
        tensor.data = tensor.data.to(device)
    for part in module.modules() if moved else ():
        if isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()  # cuDNN would copy the weights into one block in each call
    return moved


@contextmanager
def tensors_on(module: object, device: torch.device) -> Iterator[None]:
    """Has the parameters and buffers of a module, if it is one, on a device meanwhile, then each where it was."""
    moved = move_tensors(module, device)
    try:
        yield
    finally:
        for tensor, home in moved:
            tensor.data = tensor.data.to(home)


def describe(device: torch.device) -> DeviceKind:
    """Returns the kind, name and memory of a device; for a CPU the memory of the machine."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceKind(kind="cuda", name=properties.name, memory_bytes=properties.total_memory)
    return DeviceKind(kind="cpu", name=cpu_name(), memory_bytes=memory_bytes())


_OUT_OF_MEMORY = (
    *("can't allocate memory", "bad_alloc", "Cannot allocate memory"),
    *("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED"),  # of CUDA, NCCL, cuBLAS and cuDNN, outside of torch's pool
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error, not one in bapipe's words, says that the device or the process lacks memory."""
    if isinstance(error, BapipeError):
        return False
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


def framework_bytes(device: torch.device) -> int:
    """Returns the memory of a CUDA device in use for anything but torch's tensors, other processes' too; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def environment(device: torch.device = CPU) -> dict[str, object]:
    """Returns the versions of the software that times on a device depend on."""
    versions: dict[str, object] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type != "cuda":
        return versions
    return versions | _gpu_environment(device)


def gpu_uuid(device: torch.device) -> str | None:
    """Returns a name that no other GPU has, None if torch does not know it."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


_SMI_FIGURES = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
"""What nvidia-smi says of a GPU on which times depend: versions, MHz, W."""

_SMI_COMMAND = "nvidia-smi --id={} --query-gpu={} --format=csv,noheader,nounits"


def _gpu_environment(device: torch.device) -> dict[str, object]:
    """Returns a GPU's libraries, driver, clocks and power limit, and which algorithms torch may choose."""
    backends: Any = torch.backends  # torch leaves its functions, and those of NCCL, without types
    nccl: Any = torch.cuda.nccl
    attention = [
        name
        for name in ("flash", "mem_efficient", "cudnn", "math")
        if getattr(backends.cuda, f"{name}_sdp_enabled", lambda: False)()
    ]
    return {
        "cuda": torch.version.cuda,
        "cudnn": backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())) if dist.is_nccl_available() else None,
        "cudnn_benchmark": backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled() or backends.cudnn.deterministic,
        "attention": attention,
    } | _smi_figures(device)


def _smi_figures(device: torch.device) -> dict[str, object]:
    """Returns what nvidia-smi says of a GPU; nothing if it is not there, or does not know the GPU."""
    uuid = gpu_uuid(device)
    chosen = device.index or 0 if uuid is None else f"GPU-{uuid.removeprefix('GPU-')}"
    command = _SMI_COMMAND.format(chosen, ",".join(_SMI_FIGURES)).split()
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_SMI_FIGURES, told.strip().split(", "), strict=False))
