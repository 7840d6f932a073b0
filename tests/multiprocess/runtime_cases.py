"""Models, plans and the worker of test_runtime.py: every rank also trains the whole model, and compares."""

import copy
import random
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.formats.certificate import Certificate
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.plan import Plan
from bapipe.formats.prediction import Prediction
from bapipe.formats.profile import LOSS
from bapipe.planner.results.decision import stage_plan
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.transfers import Channels
from bapipe.schedules import LOOPED, SCHEDULES
from bapipe.schedules.table import Schedule
from bapipe.simulator import stage_cost
from bapipe.tracing.layers import trace
from bapipe.training.launch.worker import Rank
from tests.multiprocess.whole_model import distance, largest_gradient_error, pipelined_step, run_each, whole_step


def make_plan(
    layers: Sequence[str],
    cuts: Sequence[int],
    ranks: Sequence[int | tuple[int, ...]],
    order: Sequence[Sequence[str]],
    microbatch_size: int,
    num_microbatches: int,
    recompute: Sequence[int] = (),
    recompute_layers: Collection[str] = (),
) -> Plan:
    """Returns a plan that cuts before the layers at `cuts` and runs stage s on device or devices `ranks[s]`."""
    names = (*layers, LOSS)
    bounds = (0, *cuts, len(names))
    stages = [names[a:b] for a, b in pairwise(bounds)]
    return make_plan_of(stages, ranks, order, microbatch_size, num_microbatches, recompute, recompute_layers)


def make_plan_of(
    stages: Sequence[Sequence[str]],
    ranks: Sequence[int | tuple[int, ...]],
    order: Sequence[Sequence[str]],
    microbatch_size: int,
    num_microbatches: int,
    recompute: Sequence[int] = (),
    recompute_layers: Collection[str] = (),
) -> Plan:
    """Returns a plan of stages given by their layers that runs stage s on device or devices `ranks[s]`."""
    link = Bandwidth(bytes_per_s=10**9, latency_ns=1000)
    devices = tuple(Device(name=f"cpu{i}", host="a", kind="cpu", memory_bytes=2**30) for i in range(len(order)))
    return Plan(
        model="test",
        factory=None,
        arguments={},
        profiles={},
        cluster=Cluster(devices=devices, intra_host=link, inter_host=link),
        minibatch_size=microbatch_size * num_microbatches,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        schedule="test",
        stages=tuple(
            stage_plan(
                tuple(own),
                tuple(f"cpu{rank}" for rank in devices),
                recompute=s in recompute or not set(recompute_layers).isdisjoint(own),
                recompute_layers=frozenset(recompute_layers),
            )
            for s, (own, devices) in enumerate(zip(stages, replicas(ranks), strict=True))
        ),
        order=tuple(tuple(actions) for actions in order),
        prediction=Prediction(step_ns=0, samples_per_s=0.0, bubble=0.0, ranks=()),
        certificate=Certificate(lower_bound_ns=0, gap=0.0, proven_optimal=False, space="none"),
        alternatives=(),
    )


def replicas(ranks: Sequence[int | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) if isinstance(rank, int) else rank for rank in ranks)


def named_order(schedule: str, num_stages: int, num_microbatches: int) -> list[list[str]]:
    return _texts(SCHEDULES[schedule](num_stages, num_microbatches))


def looped_order(schedule: str, num_ranks: int, num_microbatches: int) -> tuple[list[list[str]], list[int]]:
    """Returns a table of two stages a rank, and the rank of each stage."""
    table = LOOPED[schedule](num_ranks, num_microbatches)
    return _texts(table), [ranks[0] for ranks in table.devices]


def _texts(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in rank] for rank in schedule.order]


def random_order(
    seed: int, ranks: Sequence[int | tuple[int, ...]], num_microbatches: int, split: float
) -> list[list[str]]:
    """Returns a legal table, built by running ready actions at random; a share `split` of the backwards is I and W."""
    rng = random.Random(seed)
    last = len(ranks) - 1
    done: set[str] = set()
    halves = {(s, m) for s in range(len(ranks)) for m in range(num_microbatches) if rng.random() < split}
    todo = [f"{s}F{m}" for s in range(len(ranks)) for m in range(num_microbatches)]
    for s in range(len(ranks)):
        for m in range(num_microbatches):
            todo += [f"{s}I{m}", f"{s}W{m}"] if (s, m) in halves else [f"{s}B{m}"]

    def ready(action: str) -> bool:
        phase = next(letter for letter in "FBIW" if letter in action)
        s, m = map(int, action.split(phase))
        if phase == "F":
            return (s == 0 or f"{s - 1}F{m}" in done) and (s < last or m == 0 or f"{s}F{m - 1}" in done)
        if phase == "W":
            return f"{s}I{m}" in done
        return f"{s}F{m}" in done and (s == last or f"{s + 1}B{m}" in done or f"{s + 1}I{m}" in done)

    devices = replicas(ranks)
    order: list[list[str]] = [[] for _ in range(max(map(max, devices)) + 1)]
    while todo:
        action = rng.choice([a for a in todo if ready(a)])
        todo.remove(action)
        done.add(action)
        phase = next(letter for letter in "FBIW" if letter in action)
        s, m = map(int, action.split(phase))
        order[devices[s][m % len(devices[s])]].append(action)
    return order


class Residual(nn.Module):
    """Convolutions with batch norm, in-place ReLU, and skips that cross any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm0, self.relu0 = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.conv1, self.norm1, self.relu1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.conv2, self.norm2, self.relu2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu0(self.norm0(self.stem(x)))
        y = self.relu1(self.norm1(self.conv1(x)))
        y = self.relu2(self.norm2(self.conv2(y)) + x)
        return self.head(self.pool(y).flatten(1))


class Permuting(nn.Module):
    """Hands on tensors that are views and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b, self.c = nn.Linear(6, 6), nn.Identity(), nn.Linear(4, 4), nn.Linear(6, 5)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.a(x).permute(0, 2, 1))  # (n, 6, 4), not contiguous
        y = self.relu(self.b(y))
        return self.c(y.transpose(1, 2)).mean(1)


class TwoInputs(nn.Module):
    """An encoder, and a decoder whose tokens a later stage loads; their embedding is passed on beside the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.more = nn.Linear(6, 8), nn.Linear(8, 8)
        self.embed, self.mix, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, target: Tensor, losses: Tensor) -> Tensor:  # names that torch's step() takes for itself
        context = self.more(self.encode(target).tanh())
        tokens = self.embed(losses)
        mask = losses > 4
        return self.head(self.mix(tokens).masked_fill(mask.unsqueeze(-1), 0.0) + context)


class Masked(nn.Module):
    """A mask of booleans that is passed on, past a stage that does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        mask = y > 0
        return self.c(self.b(y).relu()) * mask[:, :5]


class Frozen(nn.Module):
    """The first layers are not trained, so nothing at the first cut needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)).relu()))


class Tied(nn.Module):
    """Two layers share a weight, in one stage or in two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()))


class TiedByOperator(nn.Module):
    """A head that concatenates what is the weight of an embedding with its own: W gives a transposed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.embed, self.b = nn.Linear(6, 6), nn.Embedding(3, 6), nn.Linear(6, 6)
        self.more = nn.Parameter(torch.ones(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.embed((x[:, 0] > 0).long())
        return self.b(y.tanh()) @ torch.cat([self.embed.weight.t(), self.more], 1)


class Twice(nn.Module):
    """Calls a layer twice, and finds a size far from where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.a(self.b(y).tanh())
        return self.c(z).view(y.size(0), -1)


class Gate(nn.Module):
    """Branches on values, so it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(x) if x.sum() > 0 else self.low(x)


def gated() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Gate(), nn.Linear(6, 5))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True),
        nn.Linear(8, 5),
    )  # fmt: skip


def _rows(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, 6, dtype=torch.float64),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "mlp": (mlp, _rows),
    "residual": (Residual, lambda n: (torch.randn(n, 3, 6, 6, dtype=torch.float64),)),
    "permuting": (Permuting, lambda n: (torch.randn(n, 4, 6, dtype=torch.float64),)),
    "two-inputs": (TwoInputs, lambda n: (*_rows(n), torch.randint(0, 10, (n,)))),
    "masked": (Masked, _rows),
    "frozen": (Frozen, _rows),
    "tied": (Tied, _rows),
    "tied-by-operator": (TiedByOperator, _rows),
    "twice": (Twice, _rows),
    "gated": (gated, _rows),
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


@dataclass(frozen=True)
class Case:
    """A model, its cuts, and the table that runs it."""

    name: str
    model: str
    cuts: tuple[int, ...]
    ranks: tuple[int | tuple[int, ...], ...]
    order: tuple[tuple[str, ...], ...]
    num_microbatches: int
    microbatch_size: int = 3
    single: bool = False  # float32 in place of float64
    recompute: tuple[int, ...] = ()
    recompute_every: int = 0  # every so many layers; 0: no single layers
    bucket_bytes: int = stage_cost.BUCKET_BYTES


@dataclass(frozen=True)
class Outcome:
    """The largest errors of one rank over two steps, and what it saw."""

    loss: float
    gradient: float
    parameter: float
    gradients: int
    same_order: bool
    replicas_equal: bool
    syncs: tuple[tuple[int, int, int], ...]
    keys: tuple[str, ...]
    all_keys: tuple[str, ...]
    span_ranks: tuple[int, ...]
    most_sent: int


def case(
    name: str,
    model: str,
    cuts: Sequence[int],
    order: Sequence[Sequence[str]],
    ranks: Sequence[int | tuple[int, ...]],
    num: int,
    **more: Any,
) -> Case:
    return Case(name, model, tuple(cuts), tuple(ranks), tuple(map(tuple, order)), num, **more)


def run_cases(rank: Rank, cases: Sequence[Case]) -> list[Outcome]:
    return run_each(rank, cases, _run)


def _run(item: Case) -> Outcome:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _trained(item, _SentTensors(monkeypatch))


def _trained(item: Case, sent: "_SentTensors") -> Outcome:
    make, data = MODELS[item.model]
    torch.manual_seed(0)
    dtype = torch.float32 if item.single else torch.float64
    whole = make().to(dtype)
    part = copy.deepcopy(whole)
    num_samples = item.microbatch_size * item.num_microbatches
    batches = [(data(num_samples), torch.randint(0, 5, (num_samples,))) for _ in range(2)]
    batches = [(tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs), y) for inputs, y in batches]
    layers = [layer.name for layer in trace(part, batches[0][0]).layers]
    stage_cost.BUCKET_BYTES = item.bucket_bytes
    size, num = item.microbatch_size, item.num_microbatches
    again = layers[:: item.recompute_every] if item.recompute_every else ()
    plan = make_plan(layers, item.cuts, item.ranks, item.order, size, num, item.recompute, again)
    pipeline = Pipeline(part, plan, loss=loss, inputs=[x[:1] for x in batches[0][0]], optimizer=sgd(0.1))
    optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    loss_error = gradient_error = parameter_error = 0.0
    for inputs, target in batches:
        got = pipelined_step(pipeline, inputs, target)
        of_replicas = _buffers_of_replicas(plan, whole, inputs)
        want = whole_step(whole, optimizer, inputs, target, loss, item.num_microbatches)
        whole.load_state_dict(of_replicas, strict=False)
        loss_error = max(loss_error, abs(got - want) if got is not None else 0.0)
        gradient_error = max(gradient_error, largest_gradient_error(pipeline, whole))
        state = whole.state_dict()
        own = {k: v for k, v in pipeline.state_dict().items() if _in_order(item) or "running" not in k}
        parameter_error = max(parameter_error, *(distance(own[name], state[name]) for name in own), 0.0)
    order = tuple(map(str, pipeline.order))
    timeline = pipeline.timeline()
    return Outcome(
        loss=loss_error,
        gradient=gradient_error,
        parameter=parameter_error,
        gradients=sum(p.grad is not None for p in pipeline.named_parameters().values()),
        same_order=order == item.order[pipeline.rank] == tuple(
            str(span.action) for span in timeline.spans if span.rank == pipeline.rank
        ),
        replicas_equal=_replicas_equal(pipeline),
        syncs=tuple((sync.stage, sync.bucket, sync.num_bytes) for sync in timeline.syncs),
        keys=tuple(pipeline.state_dict()),
        all_keys=tuple(whole.state_dict()),
        span_ranks=tuple(span.rank for span in timeline.spans),
        most_sent=max(sent.counts, default=0),
    )  # fmt: skip


class _SentTensors:
    """Counts, whenever tensors are sent, how many of those sent so far still take memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        self._alive: list[weakref.ref[Tensor]] = []
        post = Channels.send

        def counted(channels: Channels, tensor: Tensor, target: int) -> dist.Work:
            self._alive.append(weakref.ref(tensor))
            self.counts.append(sum(ref() is not None for ref in self._alive))
            return post(channels, tensor, target)

        monkeypatch.setattr(Channels, "send", counted)


def _in_order(item: Case) -> bool:
    """Whether micro-batches go forward in order; if not, batch norm's running averages rightly differ."""
    for stage, devices in enumerate(replicas(item.ranks)):
        for place, rank in enumerate(devices):
            forwards = [a for a in item.order[rank] if a.startswith(f"{stage}F")]
            if forwards != [f"{stage}F{m}" for m in range(place, item.num_microbatches, len(devices))]:
                return False
    return True


def _buffers_of_replicas(plan: Plan, whole: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Returns running statistics of the stages with replicas: their mean, by how many micro-batches each has seen."""
    expected: dict[str, Tensor] = {}
    num = plan.num_microbatches
    for stage in (stage for stage in plan.stages if len(stage.devices) > 1):
        for place in range(len(stage.devices)):
            own, mine = copy.deepcopy(whole), range(place, num, len(stage.devices))
            for m in mine:
                own(*(x.chunk(num)[m].clone() for x in inputs))
            for name, buffer in own.named_buffers():
                if name.rpartition(".")[0] in stage.layers and buffer.is_floating_point():
                    expected[name] = expected.get(name, 0) + buffer * len(mine) / num
    return expected


def _replicas_equal(pipeline: Pipeline) -> bool:
    """Whether all ranks that hold a tensor hold the same bits."""
    everyone: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, pipeline.state_dict() | pipeline.optimizer_state()["tensors"])
    first: dict[str, Tensor] = {}
    return all(torch.equal(first.setdefault(name, value), value) for own in everyone for name, value in own.items())


def initial_weights(rank: Rank, cuts: Sequence[Sequence[int]]) -> list[dict[str, list[float]]]:
    """Returns, for each cut of a residual network built on the meta device, the weights all ranks start from."""
    states = []
    for cut in cuts:
        with torch.device("meta"):
            module = Residual()
        layers = [layer.name for layer in trace(module).layers]
        order = named_order("1f1b", rank.size, 2)
        plan = make_plan(layers, cut, range(rank.size), order, 2, 2)
        pipeline = Pipeline(module, plan, loss=loss, inputs=[torch.randn(1, 3, 6, 6)], seed=7)
        everyone: list[dict[str, Tensor]] = [{}] * rank.size
        dist.all_gather_object(everyone, pipeline.state_dict())
        assert sum(not p.is_meta for p in module.parameters()) == len(pipeline.named_parameters())
        states.append({k: v.flatten().tolist() for state in everyone for k, v in state.items()})
    return states


def two_ranks(rank: Rank, cases: Sequence[Case]) -> tuple[list[Outcome], list[dict[str, list[float]]]]:
    return run_cases(rank, cases), initial_weights(rank, [[3], [8]])
