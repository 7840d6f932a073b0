"""The searches under other planners' objectives against every assignment, on small random graphs."""

from itertools import product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from bapipe.graph.layer_graph import Graph
from benchmarks.planner import dnn_partitioning, pipedream, placement_workload
from tests.strategies import drawn, examples


def random_arcs(random: Random, num_nodes: int) -> frozenset[tuple[int, int]]:
    return frozenset(
        (a, b) for b in range(1, num_nodes) for a in random.sample(range(b), min(b, random.choice([1, 1, 2])))
    )


def splits_workload(random: Random) -> placement_workload.Workload:
    """Small integers, so that ties and free nodes are common; tensors may have users that no arc orders."""
    count = random.randint(1, 6)
    arcs = random_arcs(random, count)
    users = [{a} | {b for x, b in arcs if x == a} for a in range(count)]
    tensors = [(frozenset(seen), float(random.choice([0, 1, 3, 9, 30]))) for seen in users if len(seen) > 1]
    tensors += [
        (frozenset(random.sample(range(count), 2)), float(random.randrange(5)))
        for _ in range(random.randrange(2))
        if count > 1
    ]
    compute = tuple(float(random.choice([0, 0, random.randrange(1, 20)])) for _ in range(count))
    return placement_workload.Workload(
        graph=Graph(names=tuple(map(str, range(count))), arcs=arcs),
        nodes=tuple((i,) for i in range(count)),
        compute=compute,
        on_cpu=tuple(random.choice([0.0, 1.0, 4.0, 10.0]) * t for t in compute),
        size=tuple(float(random.randrange(4)) for _ in range(count)),
        tensors=tuple(tensors),
        num_devices=random.randint(1, 3),
        num_cpus=random.randrange(2),
        memory=random.choice([100.0, 100.0, 6.0]),
    )


def min_split_load(workload: placement_workload.Workload) -> float | None:
    """The minimum, over every assignment of nodes to devices without a cycle, of the largest load."""
    count, k = workload.graph.num_nodes, workload.num_devices
    best = None
    for of in product(range(k + workload.num_cpus), repeat=count):
        arcs = {(of[a], of[b]) for a, b in workload.graph.arcs if of[a] != of[b]}
        left = set(of)
        while free := {d for d in left if not any(b == d and a in left for a, b in arcs)}:
            left -= free
        if left:
            continue
        load = 0.0
        for device in set(of):
            mine = {node for node in range(count) if of[node] == device}
            if device >= k:
                load = max(load, sum(workload.on_cpu[node] for node in mine))
                continue
            if sum(workload.size[node] for node in mine) > workload.memory:
                break
            cut = sum(cost for seen, cost in workload.tensors if seen & mine and not seen <= mine)
            load = max(load, sum(workload.compute[node] for node in mine) + cut)
        else:
            best = load if best is None else min(best, load)
    return best


def test_splits_are_the_best_of_all_assignments() -> None:
    fits = 0
    for seed in range(250):
        workload = splits_workload(Random(seed))
        want = min_split_load(workload)
        if want is None:
            continue
        answer = dnn_partitioning.solve(workload)
        assert abs(answer.load - want) < 1e-6, seed
        assert abs(answer.bound - want) < 1e-6, seed
        assert sorted(node for stage in answer.stages for node in stage) == list(range(workload.graph.num_nodes))
        fits += 1
    assert fits > 200


def pipelines_workload(random: Random) -> pipedream.Workload:
    count = random.randint(1, 6)
    arcs = random_arcs(random, count)
    users = [frozenset(b for x, b in arcs if x == a) for a in range(count)]
    return pipedream.Workload(
        graph=Graph(names=tuple(map(str, range(count))), arcs=arcs),
        nodes=tuple((str(i),) for i in range(count)),
        compute_s=tuple(float(random.choice([0, random.randrange(1, 20)])) for _ in range(count)),
        params=tuple(float(random.choice([0, random.randrange(9)])) for _ in range(count)),
        outputs=tuple(((float(random.choice([0, 1, 5, 20])), use),) if use else () for use in users),
    )


def min_pipeline_load(workload: pipedream.Workload, num_devices: int, rate: float) -> float:
    count, best = workload.graph.num_nodes, float("inf")
    for num_stages in range(1, min(count, num_devices) + 1):
        for of in product(range(num_stages), repeat=count):
            if len(set(of)) < num_stages or any(of[a] > of[b] for a, b in workload.graph.arcs):
                continue
            alive = [
                sum(
                    size
                    for node, outputs in enumerate(workload.outputs)
                    for size, use in outputs
                    if of[node] < s and any(of[user] >= s for user in use)
                )
                for s in range(num_stages + 1)
            ]
            times = []
            for s in range(num_stages):
                t = sum(workload.compute_s[node] for node in range(count) if of[node] == s)
                p = sum(workload.params[node] for node in range(count) if of[node] == s)
                times.append(
                    [
                        max((t + 4 * (r - 1) / r * p / rate) / r, 2 * max(alive[s], alive[s + 1]) / rate / r)
                        for r in range(1, num_devices + 1)
                    ]
                )
            for replicas in product(range(1, num_devices + 1), repeat=num_stages):
                if sum(replicas) <= num_devices:
                    best = min(best, max(own[r - 1] for own, r in zip(times, replicas, strict=True)))
    return best


@examples(250)
@given(drawn(pipelines_workload), st.integers(1, 4))
def test_pipelines_are_the_best_of_all_assignments(workload: pipedream.Workload, num_devices: int) -> None:
    want = min_pipeline_load(workload, num_devices, 2.0)
    answer = pipedream.solve(pipedream.reduced(workload), num_devices, 2.0)
    assert abs(answer.load - want) < 1e-9 * max(1.0, want)
    assert answer.bound >= want * (1 - 1e-9)
    names = [name for stage in answer.stages for name in stage]
    assert sorted(names) == [str(i) for i in range(workload.graph.num_nodes)]
