"""Blocks of page-locked memory, without a GPU."""

import logging
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapipe.runtime import pinned_memory
from bapipe.runtime.pinned_memory import host_tensors, packed

MIB = 2**20
WIDTH, VOCABULARY, BLOCKS = 768, 50_257, 12
GPT2_BLOCK = [n * WIDTH for n in (1, 1, 3 * WIDTH, 3, WIDTH, 1, 1, 1, 4 * WIDTH, 4, 4 * WIDTH, 1)]
GPT2 = [4 * n for n in [VOCABULARY * WIDTH, 1024 * WIDTH, *(BLOCKS * GPT2_BLOCK), WIDTH, WIDTH]]
VGG16 = [4 * 9 * a * b for a, b in ((3, 64), (64, 64), (64, 128), (128, 128), (128, 256), *2 * [(256, 256)])]
VGG16 += [4 * 9 * a * b for a, b in ((256, 512), *5 * [(512, 512)])] + [4 * n * 4096 for n in (25_088, 4096, 1000)]


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([], []),
        ([0], [1]),
        ([3 * MIB, MIB, MIB], [4, 1]),
        ([5 * MIB], [8]),  # nothing else fills it
        (GPT2, [256, 128, 64, 32]),  # 474.7 MiB; alone in blocks of their own, the tensors would take 788
        (VGG16, [512, 16]),  # 527.7 MiB; 686
    ],
)
def test_tensors_fill_blocks_of_powers_of_two(sizes: list[int], blocks: list[int]) -> None:
    assert [block.num_bytes / MIB for block in packed(sizes)] == blocks


@given(st.lists(st.integers(0, 50 * MIB), max_size=30))
def test_every_tensor_has_a_place_of_its_own(sizes: list[int]) -> None:
    blocks = packed(sizes)
    assert sorted(number for block in blocks for number in block.offsets) == list(range(len(sizes)))
    for block in blocks:
        assert block.num_bytes.bit_count() == 1
        places = sorted((offset, offset + sizes[number]) for number, offset in block.offsets.items())
        assert all(offset % 512 == 0 for offset, _ in places)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        assert places[-1][1] <= block.num_bytes


def test_tensors_on_the_host_are_like_those_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "_page_locked", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    tensors = {
        "weight": torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last),
        "bias": torch.randn(7, dtype=torch.bfloat16),
        "step": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "mask": torch.ones(5, dtype=torch.bool),
    }
    host = host_tensors(tensors)
    assert list(host) == list(tensors)
    for name, tensor in tensors.items():
        host[name].copy_(tensor)
    for name, tensor in tensors.items():
        assert torch.equal(host[name], tensor)
        assert (host[name].dtype, host[name].stride()) == (tensor.dtype, tensor.stride())
    assert host["weight"].is_contiguous(memory_format=torch.channels_last)


def test_without_enough_page_locked_memory_other_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, text = torch.empty, "CUDA error: out of memory"

    def empty(*shape: int, pin_memory: bool = False, **options: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError(text)
        return plain(*shape, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", empty)
    with caplog.at_level(logging.WARNING):
        assert host_tensors({"weight": torch.ones(3)})["weight"].shape == (3,)
    assert caplog.messages == [
        "1 MiB of page-locked memory are not available, so a GPU cannot copy a checkpoint in the background: the copy "
        "is slower, and training waits for it"
    ]
    text = "CUDA error: device-side assert triggered"
    with pytest.raises(RuntimeError, match="device-side assert"):
        host_tensors({"weight": torch.ones(3)})
