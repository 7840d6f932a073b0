"""The search for Piper's objective equals trying every plan of small chains."""

import json
from itertools import product
from math import ceil, inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.planner import piper

DEGREES, OPTIONS = ("1", "2"), ("plain", "again")


def random_workload(random: Random, num_nodes: int) -> dict[str, Any]:
    """A chain; recomputing makes each node slower and smaller, by the same number of bytes in most."""

    def choices(node: int, saved: int) -> list[dict[str, Any]]:
        time, a, b, params = (random.randint(1, 20) for _ in range(4))
        into = {str(node - 1): random.randint(0, 3)} if node else {}
        out = {str(node + 1): random.randint(0, 3)} if node + 1 < num_nodes else {}
        shared = {"parameterSize": params, "syncTimeFw": into, "syncTimeBw": out}
        plain = {"id": OPTIONS[0], "timePerSample": time, "memoryUsageA": a + saved, "memoryUsageB": b, **shared}
        slower = {"timePerSample": time + random.randint(1, 5), "memoryUsageA": a, "memoryUsageB": b + 1}
        return [plain, {"id": OPTIONS[1], **slower, **shared}]

    saved = [random.choice([0, 6, 6, 9]) for _ in range(num_nodes)]
    nodes = [{"id": i, "TMPCs": {t: choices(i, saved[i]) for t in DEGREES}} for i in range(num_nodes)]
    edges = [{"sourceId": i, "destId": i + 1, "communicationCost": random.randint(0, 9)} for i in range(num_nodes - 1)]
    return {"nodes": nodes, "edges": edges}


def stage_seconds(
    found: dict[str, Any], setting: piper.Setting, first: int, stop: int, t: str, d: int, used: tuple[int, ...], y: int
) -> float:
    """One stage with an option for each node; infinite if it does not fit."""
    chosen = [found["nodes"][i]["TMPCs"][t][o] for i, o in zip(range(first, stop), used, strict=True)]
    if sum(c["memoryUsageA"] * y + c["memoryUsageB"] for c in chosen) > setting.memory:
        return inf
    sent = 0
    for edge in found["edges"]:
        u, v = edge["sourceId"], edge["destId"]
        if v == first:
            sent += 2 * (edge["communicationCost"] + chosen[0]["syncTimeFw"][str(u)])
        if u == stop - 1:
            sent += 2 * (edge["communicationCost"] + chosen[-1]["syncTimeBw"][str(v)])
    synced = 4 * (d - 1) * sum(c["parameterSize"] for c in chosen) / (d * setting.num_microbatches)
    return (sent / d + synced) / setting.bytes_per_s + sum(c["timePerSample"] for c in chosen) / d


def brute(found: dict[str, Any], setting: piper.Setting, stop: int, devices: int, later: int) -> float:
    """The minimum of the largest stage time for the first `stop` nodes, with `later` replicas after them."""
    if stop == 0:
        return 0.0
    best = inf
    for first, t, d in product(range(stop), DEGREES, range(1, devices + 1)):
        if setting.num_microbatches % d == 0 and d * int(t) <= devices:
            y = ceil((later + d) / d)
            ways = product(range(2), repeat=stop - first)
            own = min(stage_seconds(found, setting, first, stop, t, d, used, y) for used in ways)
            if own < best:
                best = min(best, max(own, brute(found, setting, first, devices - d * int(t), later + d)))
    return best


def test_the_search_equals_every_plan(tmp_path: Path) -> None:
    random, feasible = Random(0), 0
    for case in range(40):
        found = random_workload(random, random.randint(1, 4))
        path = tmp_path / f"{case}.json"
        path.write_text(json.dumps(found))
        setting = piper.Setting(
            num_devices=random.randint(1, 4), memory=random.randint(20, 120), num_microbatches=6, bytes_per_s=2.0
        )
        want = brute(found, setting, len(found["nodes"]), setting.num_devices, 0)
        answer = piper.solve(piper.Workload(path), setting)
        assert (answer.seconds if answer else inf) == pytest.approx(want), case
        assert answer is None or answer.bound == answer.seconds, case
        feasible += answer is not None
    assert 10 < feasible < 40


def test_with_small_tables_a_plan_fits_and_its_bound_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piper, "MAX_STAGES", 1)
    monkeypatch.setattr(piper, "MAX_CHOICES", 1)
    random, slower = Random(1), 0
    for case in range(20):
        found = random_workload(random, random.randint(2, 4))
        path = tmp_path / f"{case}.json"
        path.write_text(json.dumps(found))
        setting = piper.Setting(
            num_devices=random.randint(1, 4), memory=random.randint(60, 120), num_microbatches=6, bytes_per_s=2.0
        )
        want = brute(found, setting, len(found["nodes"]), setting.num_devices, 0)
        answer = piper.solve(piper.Workload(path), setting)
        if answer is None:
            continue
        assert answer.bound <= want <= answer.seconds * (1 + 1e-12), case
        assert answer.seconds == pytest.approx(seconds_of(found, setting, answer)), case
        slower += answer.seconds > want * (1 + 1e-9)
    assert slower < 10


def seconds_of(found: dict[str, Any], setting: piper.Setting, answer: piper.Answer) -> float:
    """The time of the slowest stage of a plan; infinite if one does not fit."""
    later, slowest = 0, 0.0
    for stage in reversed(answer.stages):
        later += stage.replicas
        used = tuple(OPTIONS.index(stage.options[node]) for node in stage.nodes)
        ends = stage.nodes[0], stage.nodes[-1] + 1
        y = ceil(later / stage.replicas)
        own = stage_seconds(found, setting, *ends, str(stage.tensor), stage.replicas, used, y)
        slowest = max(slowest, own)
    return slowest
