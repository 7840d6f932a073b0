"""Loss, every gradient and every updated parameter of a pipelined model equal the whole model's."""

from typing import Any

import pytest
import torch

from bapipe.schedules import LOOPED, SCHEDULES
from bapipe.training.launch.processes import launch
from tests.multiprocess.runtime_cases import (
    Case,
    Outcome,
    case,
    looped_order,
    named_order,
    random_order,
    replicas,
    run_cases,
    two_ranks,
)


def _named(schedule: str, model: str, cuts: tuple[int, ...], num: int, **more: Any) -> Case:
    ranks = range(len(cuts) + 1)
    order = named_order(schedule, len(ranks), num)
    return case(f"{schedule} {model} {cuts} m={num} {more or ''}", model, cuts, order, ranks, num, **more)


def _looped(schedule: str, model: str, cuts: tuple[int, ...], num: int, **more: Any) -> Case:
    order, ranks = looped_order(schedule, (len(cuts) + 1) // 2, num)
    return case(f"{schedule} {model} {cuts} m={num} {more or ''}", model, cuts, order, ranks, num, **more)


def _random(
    seed: int,
    model: str,
    cuts: tuple[int, ...],
    ranks: tuple[int | tuple[int, ...], ...],
    num: int,
    split: float,
    **more: Any,
) -> Case:
    order = random_order(seed, ranks, num, split)
    name = f"random {seed} {model} {cuts} on {ranks} m={num} I/W={split} {more or ''}"
    return case(name, model, cuts, order, ranks, num, **more)


SINCE_2_13 = (
    _named("1f1b", "masked", (1,), 3),
    _random(21, "masked", (1, 2), (0, 1, 0), 3, 1.0),
    _random(22, "masked", (1, 2, 3), (0, 1, 0, 1), 3, 0.5),
    _random(8, "two-inputs", (2, 3, 4), (0, 1, 0, 1), 3, 1.0),
)

TWO = (
    *(SINCE_2_13 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13) else ()),
    _named("gpipe", "mlp", (4,), 1),
    _named("gpipe", "mlp", (1,), 4),
    _named("1f1b", "mlp", (7,), 2),
    _named("1f1b", "mlp", (8,), 5),  # the last stage holds the loss alone
    _named("1f1b", "mlp", (6,), 4, single=True),  # its first layer is an in-place ReLU
    _named("1f1b", "residual", (2,), 4),
    _named("1f1b", "residual", (4,), 3),
    _named("gpipe", "residual", (8,), 2, single=True),
    _named("1f1b", "permuting", (2,), 3),
    _named("1f1b", "permuting", (1,), 3),
    _named("gpipe", "permuting", (3,), 3),
    _named("1f1b", "two-inputs", (2,), 3),
    _named("gpipe", "two-inputs", (3,), 3),
    _named("1f1b", "frozen", (1,), 8),
    _named("1f1b", "tied", (2,), 3),
    _named("1f1b", "tied", (1,), 3),
    _named("zb-h1", "twice", (2,), 3),
    _named("1f1b", "gated", (1,), 3),
    _named("zb-h1", "tied", (2,), 3),
    _named("zb-h1", "tied-by-operator", (2,), 3),
    _random(31, "tied", (2,), (0, 1), 3, 1.0),
    _random(10, "tied", (1, 2), (0, 1, 0), 3, 0.0),
    _random(11, "twice", (1, 2), (0, 1, 0), 3, 0.0),
    _named("1f1b+1", "mlp", (4,), 5),
    _named("1f1b+2", "residual", (4,), 5),
    _named("eager-1f1b", "mlp", (4,), 5),
    _named("2f2b", "residual", (4,), 5),
    _named("zb-h1", "mlp", (4,), 4),
    _named("fbp-as", "mlp", (4,), 5),
    _named("zb-h2", "residual", (5,), 4),
    _named("gpipe-2bp", "residual", (4,), 3),
    _named("1f1b-2bp", "mlp", (6,), 4),
    _looped("interleaved-1f1b", "mlp", (2, 4, 6), 3),
    _looped("looped-bfs", "residual", (2, 5, 8), 3),
    _looped("zb-v", "residual", (2, 5, 8), 4),
    _looped("v-half", "mlp", (1, 4, 7), 5),
    _looped("v-min", "mlp", (2, 4, 6), 5),
    _looped("dualpipe-v", "mlp", (2, 4, 8), 5),
    _looped("dualpipe-v", "residual", (3, 6, 8), 2),  # fewer micro-batches than the four it is drawn for
    _random(1, "mlp", (4,), (0, 1), 5, 1.0),
    _random(2, "mlp", (8,), (0, 1), 3, 1.0),
    _random(3, "mlp", (2, 4, 6), (0, 1, 1, 0), 4, 0.5),
    _random(4, "mlp", (2, 4, 6), (0, 0, 0, 1), 4, 1.0),
    _random(5, "residual", (2, 5, 8), (1, 0, 1, 0), 3, 0.5),
    _random(6, "residual", (1, 2, 3, 6, 10), (0, 1, 0, 0, 1, 1), 3, 1.0),
    _random(7, "permuting", (1, 2, 3), (0, 1, 0, 1), 3, 1.0),
    _random(9, "two-inputs", (1, 3), (0, 1, 0), 3, 0.0),
    _named("1f1b", "residual", (4,), 4, recompute=(0, 1)),
    _named("zb-h1", "mlp", (4,), 4, recompute=(0, 1)),
    _named("1f1b", "two-inputs", (2,), 3, recompute=(1,)),
    _looped("zb-v", "residual", (2, 5, 8), 4, recompute=(0, 2)),
    _random(31, "permuting", (1, 2, 3), (0, 1, 0, 1), 3, 0.5, recompute=(1, 2, 3)),
    _random(32, "residual", (1, 2, 3, 6, 10), (0, 1, 0, 0, 1, 1), 3, 1.0, recompute=(0, 1, 2, 3, 4, 5)),
    _named("1f1b", "residual", (4,), 4, recompute_every=2),
    _looped("zb-v", "permuting", (1, 2, 3), 4, recompute_every=2),
    _looped("interleaved-1f1b", "mlp", (2, 4, 6), 3, recompute=(0, 3)),
    _looped("interleaved-1f1b", "residual", (2, 5, 8), 4, recompute_every=2),
    _looped("looped-bfs", "residual", (2, 5, 8), 3, recompute=(1, 2), recompute_every=3),
    _looped("v-half", "mlp", (1, 4, 7), 4, recompute=(0, 3)),
    _looped("v-min", "residual", (2, 5, 8), 4, recompute=(1, 2, 3), recompute_every=2),
    _looped("dualpipe-v", "mlp", (2, 4, 8), 5, recompute=(0, 1, 2, 3)),
    _looped("dualpipe-v", "residual", (3, 6, 8), 4, recompute=(3,), recompute_every=2),
    _random(41, "residual", (1, 2, 3, 6, 10), (0, 1, 0, 0, 1, 1), 3, 1.0, recompute_every=2),
    _random(38, "mlp", (2, 5), ((0, 1), (0, 1), (0, 1)), 5, 0.5, single=True, recompute_every=3),  # in-place ReLU
    _random(43, "two-inputs", (2,), (0, 1), 3, 0.5, recompute_every=3),
    _random(44, "tied", (2,), (0, 1), 3, 1.0, recompute_every=2),
    _random(33, "mlp", (), ((0, 1),), 4, 0.0, bucket_bytes=500),  # data parallelism
    _random(34, "residual", (), ((0, 1),), 5, 0.0, recompute=(0,)),
    _random(35, "tied", (), ((1, 0),), 3, 0.0, single=True),
    _random(36, "frozen", (2,), ((0, 1), (0, 1)), 4, 0.0),
    _random(37, "residual", (5,), ((0, 1), (0, 1)), 3, 1.0, bucket_bytes=1),
    _random(38, "mlp", (2, 5), ((0, 1), (0, 1), (0, 1)), 5, 0.5, recompute=(1,)),
)

FOUR = (
    _named("gpipe", "mlp", (2, 4, 6), 2),
    _named("1f1b", "mlp", (1, 5, 7), 4),
    _named("1f1b", "mlp", (2, 4, 8), 7),
    _named("1f1b", "residual", (2, 5, 8), 5),
    _named("gpipe", "residual", (1, 3, 6), 3, single=True),
    _named("1f1b", "two-inputs", (1, 2, 3), 4),
    _named("zb-h1", "residual", (2, 5, 8), 6),
    _looped("interleaved-1f1b", "residual", (1, 2, 3, 5, 6, 8, 10), 6),
    _looped("zb-v", "mlp", (1, 2, 3, 4, 5, 6, 7), 5),
    _looped("v-half", "residual", (1, 2, 3, 5, 6, 8, 10), 4),
    _looped("dualpipe-v", "mlp", (1, 2, 3, 5, 6, 7, 8), 9),
    _random(11, "mlp", (2, 4, 6), (3, 1, 0, 2), 6, 1.0),
    _random(12, "residual", (1, 2, 3, 5, 6, 8, 10), (0, 1, 2, 3, 3, 2, 1, 0), 4, 0.5),
    _random(13, "mlp", (1, 2, 3, 5, 6, 7, 8), (0, 0, 1, 2, 3, 1, 2, 0), 4, 1.0),
    _random(14, "mlp", (4,), ((0, 1, 2), 3), 6, 0.0),
    _random(15, "residual", (4,), ((0, 1, 2), 3), 5, 1.0, recompute=(0,)),
    _random(16, "residual", (4,), ((0, 1), (2, 3)), 4, 0.5, single=True),
    _random(17, "residual", (2, 5), (0, (3, 1), 2), 5, 0.5, bucket_bytes=1),
    _random(18, "mlp", (2, 6), ((0, 1), 2, 3), 4, 1.0),
    _random(19, "two-inputs", (2, 3), (3, 0, (1, 2)), 4, 0.0),  # the last stage has replicas, and loads an input
    _random(20, "residual", (3,), (2, (0, 1, 3)), 7, 0.5, recompute=(1,)),
    _random(23, "mlp", (1, 4, 6), ((0, 1), (2, 3), (0, 1), (2, 3)), 4, 0.5),
    _random(4, "mlp", (3, 5, 7), (2, (0, 1), 3, (0, 1)), 2, 1.0),  # rank 0 ends with 3W0 1W0, rank 1 with 1W1 3W1
)


def test_every_named_schedule_runs() -> None:
    run = {item.name.split()[0] for item in TWO}
    assert run >= {*SCHEDULES, *LOOPED}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Outcome]]:
    results = launch(two_ranks, ["cpu0", "cpu1"], TWO, timeout_s=60)
    first, second = results[0][1]
    found = {item.name: [result[0][i] for result in results] for i, item in enumerate(TWO)}
    assert first == second, "initial weights depend on the cut"
    assert sorted(first) == sorted(found["1f1b residual (2,) m=4 "][0].all_keys)
    return found


@pytest.fixture(scope="module")
def four() -> dict[str, list[Outcome]]:
    results = launch(run_cases, [f"cpu{i}" for i in range(4)], FOUR, timeout_s=60)
    return {item.name: [result[i] for result in results] for i, item in enumerate(FOUR)}


@pytest.mark.parametrize("item", TWO, ids=lambda item: item.name)
def test_two_ranks_equal_the_whole_model(item: Case, two: dict[str, list[Outcome]]) -> None:
    _check(item, two[item.name])


@pytest.mark.parametrize("item", FOUR, ids=lambda item: item.name)
def test_four_ranks_equal_the_whole_model(item: Case, four: dict[str, list[Outcome]]) -> None:
    _check(item, four[item.name])


def test_a_stage_without_gradients_keeps_no_more_than_it_has_in_flight(two: dict[str, list[Outcome]]) -> None:
    # Nothing else holds what rank 0 sends: two micro-batches are in flight there. Rank 1 sends no gradients.
    assert [outcome.most_sent for outcome in two["1f1b frozen (1,) m=8 "]] == [2, 0]


def _check(item: Case, outcomes: list[Outcome]) -> None:
    tolerance = 1e-5 if item.single else 1e-12
    assert all(outcome.same_order and outcome.replicas_equal for outcome in outcomes)
    for outcome in outcomes:
        assert max(outcome.loss, outcome.gradient, outcome.parameter) <= tolerance
    merged = [key for outcome in outcomes for key in outcome.keys]
    assert sorted(set(merged)) == sorted(outcomes[0].all_keys)
    assert all(outcome.syncs == outcomes[0].syncs for outcome in outcomes)
    syncs = outcomes[0].syncs
    assert {stage for stage, _, _ in syncs} == {s for s, devices in enumerate(replicas(item.ranks)) if len(devices) > 1}
    assert all(bucket == 0 for _, bucket, _ in syncs) == (item.bucket_bytes > 500 or not syncs)
    assert all(outcome.span_ranks == outcomes[0].span_ranks for outcome in outcomes)
