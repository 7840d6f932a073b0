"""The seeds of GPUs that torch keeps until it first uses one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeds_of_unused_gpus_restored() -> Iterator[None]:
    """In this context GPUs may be seeded that torch has not used yet; afterwards their seeds are as before.

    So they are where it has used them meanwhile. Generators of GPUs that were in use before are not touched.
    """
    tracker, were_in_use = torch.cuda._lazy_seed_tracker, _are_in_use()
    before = dict(vars(tracker))
    try:
        yield
    finally:
        vars(tracker).update(before)
        if _are_in_use() and not were_in_use:
            torch.cuda.manual_seed_all(torch.Generator().initial_seed())  # which a generator has that nobody has seeded
            for seed, _ in filter(None, tracker.get_calls()):
                seed()


def _are_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
