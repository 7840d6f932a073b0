"""Devices of this machine."""

import torch

from bapipe.hardware import memory_bytes, num_cores
from bapipe.torch_device import describe, environment, framework_bytes, num_devices


def test_a_cpu_has_the_memory_of_the_machine_and_its_cores_are_devices() -> None:
    device = describe(torch.device("cpu"))
    assert (device.kind, device.memory_bytes) == ("cpu", memory_bytes())
    assert num_devices("cpu") == num_cores()
    assert framework_bytes(torch.device("cpu")) == 0


def test_the_environment_names_versions() -> None:
    assert environment()["torch"] == str(torch.__version__)
    assert set(environment()) == {"python", "torch", "system"}
