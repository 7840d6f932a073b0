"""Devices of this machine."""

import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bapipe import torch_device
from bapipe.errors import BapipeError
from bapipe.hardware import memory_bytes, num_cores
from bapipe.torch_device import (
    current_device,
    describe,
    environment,
    framework_bytes,
    local_device,
    num_devices,
    prepared_cpu,
    tensors_on,
)

CPU = torch.device("cpu")


def test_a_cpu_has_the_memory_of_the_machine_and_its_cores_are_devices() -> None:
    device = describe(torch.device("cpu"))
    assert (device.kind, device.memory_bytes) == ("cpu", memory_bytes())
    assert num_devices("cpu") == num_cores()
    assert num_devices("v100") == 0
    assert framework_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "`device` is 'gpu': want cpu or cuda"),
        ("cuda:x", "want cpu or cuda"),
        ("cuda:²", "want cpu or cuda"),
        ("cuda:99", "torch finds no device 'cuda:99' on this machine: choose `device` cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_a_line(name: str, message: str) -> None:
    with pytest.raises(BapipeError, match=message):
        local_device(name)


def test_threads_and_malloc_are_as_by_default_after_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[int, int] = {}
    libc = SimpleNamespace(mallopt=options.__setitem__)
    monkeypatch.setattr(torch_device, "ctypes", SimpleNamespace(CDLL=lambda _: libc))
    monkeypatch.setattr(torch_device, "sys", SimpleNamespace(platform="linux"))
    before = torch.get_num_threads()
    with prepared_cpu(before + 1):
        assert torch.get_num_threads() == before + 1
        assert options == {-4: 0, -1: -1}  # no block is apart, and none is given back
    assert torch.get_num_threads() == before
    assert options == {-4: 65_536, -3: 32 * 2**20, -1: 64 * 2**20}


def test_the_environment_names_versions() -> None:
    assert environment()["torch"] == str(torch.__version__)
    assert set(environment()) == {"python", "torch", "system"}


def test_the_current_cuda_device_is_the_given_one_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert current_device("cuda:3") == torch.device("cuda", 3)
    assert current_device(torch.device("cuda")) == torch.device("cuda", 2)
    assert current_device("cpu") == torch.device("cpu")
    assert current == [torch.device("cuda", 3), torch.device("cuda", 2)]
    assert local_device("cuda") == torch.device("cuda", 2)  # an index, so that it equals the device of a tensor there


class WithState(nn.Module):
    """A loss with a buffer that is in no state dict, and with what is in one but no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(3), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 1}


def test_the_tensors_of_a_module_are_on_a_device_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, device = WithState(), torch.device("cuda", 3)
    moves: list[torch.device] = []

    def to(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
        moves.append(place)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    with tensors_on(loss, device):
        assert moves == [device]
    assert moves == [device, CPU]
    with tensors_on(nn.functional.mse_loss, device), tensors_on(loss, CPU):
        assert len(moves) == 2


def test_a_driver_that_is_too_old_is_named_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BapipeError, match=r"choose `device` cpu, or update the driver.*11040"):
        local_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BapipeError, match="or one of the 2 that it finds, cuda:0 to cuda:1"):
        local_device("cuda:2")
    for use in (local_device, current_device):
        with pytest.raises(BapipeError, match=r"^update the driver of the GPU.*11040") as caught:
            use("cuda:1")
        assert "\n" not in str(caught.value)


def test_the_environment_of_a_gpu_names_its_libraries_driver_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="580.65, 1980, 3201, 700.00\n")

    properties = SimpleNamespace(uuid="1-2-3", major=9, minor=0)  # torch reads the version where there is a GPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    libraries = {"python", "torch", "system", "cuda", "cudnn", "nccl"}
    settings = {"cudnn_benchmark", "deterministic", "attention"}
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("nvidia-smi")))
    assert set(environment(torch.device("cuda", 0))) == libraries | settings
    monkeypatch.setattr(subprocess, "run", run)
    found = environment(torch.device("cuda", 0))
    assert set(found) == libraries | settings | {"driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit"}
    assert (found["driver_version"], found["power.limit"], found["cudnn_benchmark"]) == ("580.65", "700.00", True)
    assert asked[0][1] == "--id=GPU-1-2-3"
    assert "math" in str(found["attention"])
