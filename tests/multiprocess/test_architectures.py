"""Architectures of transformers, cut at random places, give the loss, gradients and buffers of their own code."""

import pytest
import torch

from tests.models.architectures import ARCHITECTURES, RELATIVES
from tests.models.in_one_process import OneProcess, Setting, largest_error, whole_step

SETTINGS = (Setting(seed=1), Setting(seed=2, split=True), Setting(seed=3, split=True, recompute=True))


@pytest.mark.usefixtures("alone", "one_thread")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in RELATIVES])
def test_an_architecture_in_stages(name: str) -> None:
    architecture = ARCHITECTURES[name]()
    single = next(architecture.module.parameters()).dtype == torch.float32
    want = whole_step(architecture)
    model = OneProcess(architecture)
    for setting in SETTINGS:
        what, error = largest_error(model.step(setting), want)
        assert error <= (1e-5 if single else 1e-7 if what == "loss" else 1e-11), (setting, what, error)
