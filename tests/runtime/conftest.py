"""What several files of these tests need."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
