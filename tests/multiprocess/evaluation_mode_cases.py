"""The worker of test_evaluation_mode.py: pipelines that train a little, and the whole model beside them in evaluation mode."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from bapipe.training.launch.worker import Rank
from tests.multiprocess.runtime_cases import looped_order, loss, make_plan, named_order, random_order
from tests.multiprocess.whole_model import run_each

SIZE, NUM = 3, 5


class Dropping(nn.Module):
    """Dropout as a module and as a function, running statistics, and a skip over any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.b, self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.a(x)))
        y = nn.functional.dropout(self.b(x).relu(), 0.5, self.training)
        return self.d(self.c(y) + x)


class Looking(Dropping):
    """Branches on a shape, so that torch.export traces it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.shape[1] == 6 else x[:, :6])


class Passing(nn.Module):
    """An integer input that only the last layers use, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.embed, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(self.a(x).tanh())
        return self.c(y + self.embed(token)), y


def first_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return loss(output[0], target)


@dataclass(frozen=True)
class Case:
    """A model on a plan, evaluated on some samples."""

    name: str
    model: Callable[[], nn.Module]
    cuts: tuple[int, ...]
    ranks: tuple[int | tuple[int, ...], ...]
    num_samples: int = SIZE * NUM
    looped: bool = False
    autocast: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a rank got, as far as it has the last stage; errors are against the whole model."""

    loss_error: float | None
    output_error: float | None
    rows: tuple[tuple[int, int], ...]
    unchanged: bool


def run_cases(rank: Rank, cases: Sequence[Case]) -> list[Outcome]:
    return run_each(rank, cases, _run)


def _run(item: Case) -> Outcome:
    torch.manual_seed(1)
    module = item.model().double()
    whole = copy.deepcopy(module)
    num_samples, two = SIZE * NUM, item.model is Passing
    x = torch.randn(num_samples, 6, dtype=torch.float64)
    given = (x, torch.randint(0, 5, (num_samples,))) if two else (x,)
    target = torch.randint(0, 5, (num_samples,))
    layers = [layer.name for layer in trace(module, given).layers]
    if item.looped:
        order, _ = looped_order("interleaved-1f1b", 2, NUM)
    elif any(isinstance(ranks, tuple) for ranks in item.ranks):
        order = random_order(3, item.ranks, NUM, 0.0)
    else:
        order = named_order("1f1b", len(item.ranks), NUM)
    plan = make_plan(layers, item.cuts, item.ranks, order, SIZE, NUM)
    computed = first_loss if two else loss
    narrow = torch.bfloat16 if item.autocast else None
    pipeline = Pipeline(module, plan, loss=computed, inputs=given, evaluates=True, autocast=narrow)
    pipeline.step(*given, target=target)
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}
    everyone: list[dict[str, Tensor]] = [{}, {}]
    dist.all_gather_object(everyone, before)
    whole.load_state_dict({name: value for state in everyone for name, value in state.items()})
    n = item.num_samples
    got = pipeline.evaluate(*(t[:n] for t in given), target=target[:n], num_samples=n, keep=lambda output: (output,))
    unchanged = module.training and all(torch.equal(before[k], v) for k, v in pipeline.state_dict().items())
    if got is None:
        return Outcome(None, None, (), unchanged)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=item.autocast):
        want = whole.eval()(*(t[:n] for t in given))
        want_loss = computed(want, target[:n]).item()
    assert got.loss is not None
    flat = [(o, w) for (o,), rows in zip(got.outputs, got.rows, strict=True) for o, w in _pairs(o, want, rows)]
    return Outcome(
        loss_error=abs(got.loss - want_loss),
        output_error=max((float((o.double() - w.double()).abs().max()) for o, w in flat), default=0.0),
        rows=tuple((rows.start, rows.stop) for rows in got.rows),
        unchanged=unchanged,
    )


def _pairs(
    got: Tensor | tuple[Tensor, ...], want: Tensor | tuple[Tensor, ...], rows: range
) -> list[tuple[Tensor, Tensor]]:
    if isinstance(got, Tensor):
        assert isinstance(want, Tensor)
        assert len(got) == len(rows)
        return [(got, want[rows.start : rows.stop])]
    return [pair for g, w in zip(got, want, strict=True) for pair in _pairs(g, w, rows)]


class Drawing(nn.Module):
    """Draws in two layers, in evaluation mode, too: of zeros it gives the difference of what they draw."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x) + torch.rand_like(x)
        second = self.b(x) - torch.rand_like(x)
        return first + second


def drawn(rank: Rank | None, plans: Sequence[Plan]) -> list[dict[int, list[list[float]]]]:
    """Returns the outputs of two evaluations by each plan, by the row in both; of ranks of the last stage."""
    found: list[dict[int, list[list[float]]]] = []
    x, target = torch.zeros(SIZE * NUM, 5), torch.zeros(SIZE * NUM, dtype=torch.int64)
    for plan in plans:
        pipeline = Pipeline(Drawing(), plan, loss=loss, inputs=[x], evaluates=True)
        pipeline.step(x, target=target)
        results = [pipeline.evaluate(x), pipeline.evaluate(x)]
        found.append(
            {
                number * len(x) + rows.start: output.tolist()
                for number, result in enumerate(results)
                if result is not None
                for output, rows in zip(result.outputs, result.rows, strict=True)
            }
        )
    return found


class Branching(nn.Module):
    """Has another layer in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.other = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) if self.training else self.other(x)


def refused() -> str:
    """Returns why a model that is another in evaluation mode is refused; in a group of one process."""
    module, x = Branching(), torch.randn(6, 6)
    layers = [layer.name for layer in trace(module, [x]).layers]
    plan = make_plan(layers, (1,), (0, 0), [["0F0", "1F0", "1B0", "0B0"]], 6, 1)
    try:
        Pipeline(module, plan, loss=loss, inputs=[x], evaluates=True)
    except InvalidModel as error:
        return str(error)
    return ""
