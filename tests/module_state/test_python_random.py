"""Generators are afterwards what they were: also those of all GPUs, for which others stand here."""

from collections.abc import Callable

import pytest
import torch

from bapipe.module_state.python_random import all_generators_restored, seed_all_generators

Use = Callable[[], list[int]]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Returns what makes torch use two GPUs, as if for the first time, and returns the seeds of their generators."""
    monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", type(torch.cuda._lazy_seed_tracker)())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", ())

    def first_use() -> list[int]:
        if not torch.cuda.default_generators:
            monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 2)
            monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(), torch.Generator()))
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            for call in torch.cuda._lazy_seed_tracker.get_calls():
                if call:
                    call[0]()
        return [generator.initial_seed() for generator in torch.cuda.default_generators]

    return first_use


def test_generators_of_gpus_in_use_are_put_back(use: Use) -> None:
    torch.manual_seed(42)
    use()
    one, other = torch.cuda.default_generators
    torch.rand(3, generator=one)
    with all_generators_restored():
        seed_all_generators(3)
        assert use() == [3, 3]
    assert torch.equal(torch.rand(5, generator=one), torch.rand(5, generator=_after(42, 3)))
    assert torch.equal(torch.rand(5, generator=other), torch.rand(5, generator=_after(42, 0)))


def _after(seed: int, num_drawn: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(num_drawn, generator=generator)
    return generator


@pytest.mark.parametrize("used_inside", [False, True])
def test_seeds_of_gpus_that_are_not_in_use_yet_are_put_back(use: Use, *, used_inside: bool) -> None:
    torch.manual_seed(42)
    with all_generators_restored():
        seed_all_generators(3)
        if used_inside:
            assert use() == [3, 3]
    assert use() == [42, 42]


def test_a_gpu_that_nobody_has_seeded_has_the_seed_of_a_new_generator(use: Use) -> None:
    with all_generators_restored():
        seed_all_generators(3)
        use()
    assert use() == [torch.Generator().initial_seed()] * 2
