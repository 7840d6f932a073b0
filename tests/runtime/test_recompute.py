"""The bytes that a recomputing stage keeps from F to its backward and from its second forward, computed by hand."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from bapipe.profiler.measure import measure_model
from bapipe.runtime.recompute import RecomputedStage


@contextmanager
def saved_beside(module: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd saves within the context, except the module's parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    found: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage takes the place of another

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor)
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def test_a_stage_that_recomputes_keeps_its_input_until_its_second_forward_keeps_all() -> None:
    module = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 5))
    made = measure_model(
        module,
        (torch.randn(1, 6),),
        torch.zeros(1, dtype=torch.int64),
        functional.cross_entropy,
        microbatch_sizes=(4,),
        name="small",
        seconds_per_size=0.0,
    )
    stash = [m.stash_bytes for m in made.measurements[0].layers[:3]]
    assert stash == [4 * 4 * 6, 4 * 4 * 7, 4 * 4 * 7]  # the stage's input; a mask; what dropout gives
    stage, x = RecomputedStage(module.train(), torch.device("cpu")), torch.randn(4, 6, requires_grad=True)
    with saved_beside(module) as first:
        y = stage.first(0, lambda: stage(x))
    assert not first
    with saved_beside(module) as second, stage.recomputing(0):
        again = stage(x)
    assert torch.equal(y, again)
    assert sum(second.values()) == sum(stash)
    assert second[x.untyped_storage().data_ptr()] == stash[0]
