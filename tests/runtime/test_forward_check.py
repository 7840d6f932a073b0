"""Forwards may not communicate with processes of their pipeline, which never run them."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.testing._internal.distributed.fake_pg import FakeStore

from bapipe.equivalence.communication import ForwardCommunicates, forwards_checked
from bapipe.errors import BapipeError, InvalidModel
from bapipe.formats.settings import Settings
from bapipe.profiler.profile import profile
from tests.multiprocess.communicating_cases import Centered, model, two_stages

X, Y = torch.ones(4, 4), torch.zeros(4, 4)


@pytest.fixture
def four() -> Iterator[SimpleNamespace]:
    """Process 0 of four, of which 0 and 2 run the pipeline; all messages are lost."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield SimpleNamespace(pipeline=dist.new_group([0, 2]), other=dist.new_group([0, 1]))
    dist.destroy_process_group()


def of_group(group: dist.ProcessGroup) -> nn.Module:
    layer = Centered()
    layer.group = group
    return model(layer)


@pytest.mark.parametrize("check", [True, False])
def test_a_forward_may_not_communicate_with_the_pipeline(four: SimpleNamespace, check: bool) -> None:
    with pytest.raises(InvalidModel, match=r"^the forward of layer '1' communicates with other processes \(allreduce"):
        two_stages(of_group(four.pipeline), group=four.pipeline, check=check).step(X, target=Y)


def test_a_layer_may_be_split_over_processes_that_are_not_of_the_pipeline(four: SimpleNamespace) -> None:
    two_stages(of_group(four.other), group=four.pipeline).step(X, target=Y)


def test_only_the_first_forward_is_checked_while_it_trains(four: SimpleNamespace) -> None:
    pipeline = two_stages(of_group(four.other), group=four.pipeline)
    pipeline.step(X, target=Y)
    pipeline.modules[0].get_submodule("1").group = four.pipeline
    pipeline.step(X, target=Y)


class CenteredInEvaluation(Centered):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone() if self.training else super().forward(x)


@pytest.mark.parametrize("check", [True, False])
def test_a_forward_in_evaluation_mode_is_checked_too(four: SimpleNamespace, check: bool) -> None:
    layer = CenteredInEvaluation()
    layer.group = four.pipeline
    with pytest.raises(InvalidModel, match="the forward of layer '1' communicates"):
        two_stages(model(layer), group=four.pipeline, check=check, evaluates=True).evaluate(X)


def test_a_loss_is_checked_in_evaluation(four: SimpleNamespace) -> None:
    def summed(output: Tensor, target: Tensor) -> Tensor:
        value = mse_loss(output, target)
        if not torch.is_grad_enabled():
            dist.all_reduce(value, group=four.pipeline)
        return value

    pipeline = two_stages(model(nn.Tanh()), group=four.pipeline, evaluates=True, loss=summed, ranks=(1, 0))
    with pytest.raises(BapipeError, match="the loss communicates with processes that run other stages"):
        pipeline.evaluate(X, target=Y)


def test_operators_that_take_functions_may_be_called(four: SimpleNamespace) -> None:
    with forwards_checked(nn.Tanh()):
        more = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))
    assert more.tolist() == [2.0, 2.0]


def test_profiling_refuses_it_where_other_processes_would_have_to_join_in(four: SimpleNamespace) -> None:
    settings = Settings(threads=torch.get_num_threads())
    with pytest.raises(ForwardCommunicates, match="the forward of layer '1' communicates"):
        profile(of_group(four.other), (X,), Y, mse_loss, microbatch_sizes=(2,), settings=settings)


def test_a_synchronized_batch_norm_is_refused_unless_it_is_frozen() -> None:
    module = model(nn.SyncBatchNorm(4))
    with pytest.raises(InvalidModel, match=r"^module '1' is a SyncBatchNorm, .* use a batch norm"):
        profile(module, (X,), Y, mse_loss, microbatch_sizes=(2,))
    module[1].eval()  # type: ignore[index]
    assert [layer.name for layer in profile(module, (X,), Y, mse_loss, microbatch_sizes=(2,)).layers][1] == "1"
