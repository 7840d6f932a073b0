"""Devices of this machine."""

import pytest
import torch

from bapipe.errors import BapipeError
from bapipe.hardware import memory_bytes, num_cores
from bapipe.torch_device import current_device, describe, environment, framework_bytes, local_device, num_devices


def test_a_cpu_has_the_memory_of_the_machine_and_its_cores_are_devices() -> None:
    device = describe(torch.device("cpu"))
    assert (device.kind, device.memory_bytes) == ("cpu", memory_bytes())
    assert num_devices("cpu") == num_cores()
    assert framework_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "`device` is 'gpu': want cpu or cuda"),
        ("cuda:x", "want cpu or cuda"),
        ("cuda:99", "torch finds no device 'cuda:99' on this machine: choose `device` cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_a_line(name: str, message: str) -> None:
    with pytest.raises(BapipeError, match=message):
        local_device(name)


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
