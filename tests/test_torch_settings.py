"""TF32 and the memory format, as profiles and pipelines set them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bapipe.formats.settings import Settings
from bapipe.torch_settings import in_memory_format, tf32

BACKENDS: Any = torch.backends
OFF = ["ieee", "none", "none"]  # as torch's older names set them; "none" follows the general setting, which is none
PARTS = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)


def precisions() -> list[str]:
    return [part.fp32_precision for part in PARTS]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = precisions()
    yield
    for part, precision in zip(PARTS, before, strict=True):
        part.fp32_precision = precision


@pytest.mark.parametrize(("allowed", "expected"), [(True, ["tf32"] * 3), (False, OFF)])
def test_all_three_kinds_of_operators_are_set_and_restored(allowed: bool, expected: list[str]) -> None:
    before = precisions()
    with tf32(allowed):
        assert precisions() == expected
        assert (BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32) == (allowed, allowed)
    assert precisions() == before
    assert (BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32) == (False, True)


def test_a_general_setting_does_not_count() -> None:
    BACKENDS.fp32_precision = "tf32"
    try:
        with tf32(False):
            assert precisions() == OFF
        assert BACKENDS.fp32_precision == "tf32"
        assert precisions() == ["tf32"] * 3
    finally:
        BACKENDS.fp32_precision = "none"


def test_torch_can_export_meanwhile() -> None:
    with tf32(False):
        torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    assert torch.backends.mkldnn.enabled  # an export that fails leaves it off


def test_settings_made_by_torch_s_newer_names_are_no_error() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError), tf32(False):
        raise RuntimeError  # restored after errors, too
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_settings_made_by_torch_s_older_names_are_no_error() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    with tf32(False):
        assert precisions() == OFF
    assert precisions()[0] == "tf32"


def test_only_images_become_channels_last() -> None:
    settings = Settings(channels_last=True)
    assert in_memory_format(torch.zeros(2, 3, 4, 5), settings).stride() == (60, 1, 15, 3)
    assert in_memory_format(torch.zeros(2, 3, 4), settings).stride() == (12, 4, 1)
