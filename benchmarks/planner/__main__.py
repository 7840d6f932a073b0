"""Third-party workloads under their own objectives: our plans compared with those of the planners they come from.

    python -m benchmarks.planner FOLDER

FOLDER holds the workloads, with `evaluate.py`, which computes a plan's value, and `baselines.json`, the other
planners' values and CPU seconds on one busy core of two (AMD EPYC). The workloads come from

    dnn-partitioning/{LayerGraphs,OperatorGraphs}/   https://github.com/msr-fiddle/dnn-partitioning at b207b6a
    pipedream/<model>/graph.txt                      https://github.com/msr-fiddle/pipedream at 7db6a1c
    piper/bert32a100.json                            https://github.com/msr-fiddle/piper at d7fc8cf

all under the MIT licence. Every plan is evaluated by `evaluate.py`, not by the search that found it. Seconds are CPU
seconds from the file to the plan, after a first search that loads numpy. LayerGraphs charge transfers in seconds and
compute in milliseconds: they are here for their size only.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import parser_of
from benchmarks.planner import dnn_partitioning, pipedream, piper, placement_workload

EXACT_DP, LINEAR_DP = "dnnp DP (exact over contiguous splits)", "dnnp DPL (linearized DP)"
GIGABYTE = 1e9
out = Console(width=170)


def evaluator(folder: Path) -> ModuleType:
    """Returns the folder's own `evaluate.py`."""
    spec = importlib.util.spec_from_file_location("evaluate", folder / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(search: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    answer = search()
    return answer, time.process_time() - start


def _solve_placement(path: Path) -> dnn_partitioning.Answer:
    return dnn_partitioning.solve(placement_workload.read(path))


def _solve_pipedream(path: Path, num_devices: int) -> pipedream.Answer:
    return pipedream.solve(pipedream.read(path), num_devices, GIGABYTE)


def _solve_piper(path: Path, setting: piper.Setting) -> piper.Answer | None:
    return piper.solve(piper.Workload(path), setting)


def table(title: str, *columns: str) -> Table:
    drawn = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="left" if i == 0 else "right")
    return drawn


def proof(load: float, bound: float) -> str:
    gap = load / bound - 1
    return "proven" if gap < 1e-9 else f"gap {gap:.2%}"


def splits(folder: Path, evaluate: ModuleType, baselines: list[dict[str, Any]]) -> Table:
    """The graphs of dnn-partitioning."""
    known = {(b["workload"], b["planner"]): b for b in baselines if b["family"] == "dnnp"}
    drawn = table(
        "dnn-partitioning: largest load of a device, ms",
        *("workload", "nodes", "downsets", "devices", "ours", "exact DP", "ratio", "", "CPU s", "exact DP's"),
        *("speed-up", "linear DP's", "speed-up"),
    )
    for path in sorted((folder / "dnn-partitioning").glob("*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        answer, seconds = timed(partial(_solve_placement, path))
        instance = json.loads(path.read_text())
        placed = list(zip(answer.stages, answer.on_cpu, strict=True))
        plan = {
            "fpgas": [{"nodes": list(nodes)} for nodes, cpu in placed if not cpu],
            "cpus": [{"nodes": list(nodes)} for nodes, cpu in placed if cpu],
        }
        priced = evaluate.eval_dnnp(instance, plan)
        assert priced["feasible"], name
        exact, linear = known[name, EXACT_DP], known[name, LINEAR_DP]
        drawn.add_row(
            name,
            *(str(len(instance["nodes"])), str(answer.num_downsets or "many"), str(instance["maxFPGAs"])),
            *(f"{priced['objective']:.6f}", f"{exact['value']:.6f}", f"{priced['objective'] / exact['value']:.9f}"),
            *(proof(priced["objective"], answer.bound), f"{seconds:.3f}", f"{exact['search_cpu_s']:.3f}"),
            *(f"{exact['search_cpu_s'] / seconds:.1f}", f"{linear['search_cpu_s']:.3f}"),
            f"{linear['search_cpu_s'] / seconds:.1f}",
        )
    return drawn


def pipelines(folder: Path, evaluate: ModuleType, baselines: list[dict[str, Any]]) -> Table:
    """PipeDream's profiles on one level of links of 1 GB/s."""
    known = [b for b in baselines if b["family"] == "pipedream" and b.get("config", "").startswith("flat")]
    drawn = table(
        "PipeDream: seconds of a mini-batch, every boundary charged, 1 GB/s",
        *("workload", "devices", "ours", "optimum", "ratio", "", "PipeDream", "ratio", "CPU s", "PipeDream's"),
        *("speed-up", "reference's", "speed-up", "replicas"),
    )
    for b in sorted(known, key=lambda b: (b["workload"], b["num_machines"][0])):
        if not b["config"].endswith("acr1"):
            continue
        path, num_devices = folder / "pipedream" / b["workload"] / "graph.txt", b["num_machines"][0]
        answer, seconds = timed(partial(_solve_pipedream, path, num_devices))
        stages = [
            {"nodes": list(nodes), "replicas": replicas}
            for nodes, replicas in zip(answer.stages, answer.replicas, strict=True)
        ]
        priced = evaluate.eval_pipedream(
            evaluate.PDGraph(str(path)), {"stages": stages}, GIGABYTE, 1.0, "exact", charge_first_output=True
        )
        assert priced["contiguous"], path
        assert priced["machines"] <= num_devices, path
        value, optimum = priced["objective"], b["reference_optimum_charged"]
        theirs = b["value_all_comm_charged_exact_tensors"]
        drawn.add_row(
            *(b["workload"], str(num_devices), f"{value:.9f}", f"{optimum:.9f}", f"{value / optimum:.9f}"),
            *(proof(value, answer.bound), f"{theirs:.9f}", f"{theirs / value:.3f}", f"{seconds:.4f}"),
            *(f"{b['search_cpu_s']:.3f}", f"{b['search_cpu_s'] / seconds:.0f}"),
            *(f"{b['reference_optimum_charged_cpu_s']:.2f}", f"{b['reference_optimum_charged_cpu_s'] / seconds:.1f}"),
            "+".join(map(str, answer.replicas)),
        )
    return drawn


def tensor_parallel(folder: Path, evaluate: ModuleType, baselines: list[dict[str, Any]]) -> Table:
    """Piper's BERT-32 with tensor-parallel options."""
    path = folder / "piper" / "bert32a100.json"
    instance = json.loads(path.read_text())
    drawn = table(
        "Piper, BERT-32 on A100s: milliseconds a sample, 1,920 micro-batches",
        *("devices", "GiB each", "ours", "Piper", "ratio", "", "CPU s", "Piper's", "speed-up", "stages"),
    )
    known = [b for b in baselines if b["family"] == "piper" and b["planner"] == "Piper"]
    for b in sorted(known, key=lambda b: (b["k"], b["mem_bytes"])):
        setting = piper.Setting(
            num_devices=b["k"], memory=b["mem_bytes"], num_microbatches=b["N"], bytes_per_s=b["bandwidth_Bps"]
        )
        answer, seconds = timed(partial(_solve_piper, path, setting))
        stages = [
            {
                "nodes": stage.nodes,
                "dataParallelDegree": stage.replicas,
                "tensorParallelDegree": stage.tensor,
                "TMPCids": stage.options,
            }
            for stage in answer.stages
        ]
        priced = evaluate.eval_piper(instance, {"stages": stages}, b["k"], b["mem_bytes"], b["N"], b["bandwidth_Bps"])
        assert priced["feasible_devices"], setting
        assert priced["feasible_memory"], setting
        assert priced["contiguous"], setting
        drawn.add_row(
            *(str(b["k"]), f"{b['mem_bytes'] / 2**30:.0f}", f"{1e3 * priced['objective']:.6f}"),
            *(f"{1e3 * b['value']:.6f}", f"{priced['objective'] / b['value']:.9f}"),
            *(proof(priced["objective"], answer.bound), f"{seconds:.3f}", f"{b['search_cpu_s']:.3f}"),
            *(f"{b['search_cpu_s'] / seconds:.1f}", str(len(stages))),
        )
    return drawn


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="where the workloads are")
    folder = parser.parse_args().folder
    if not (folder / "baselines.json").is_file():
        sys.exit(f"{folder} has no baselines.json: want the folder of the workloads")
    evaluate, baselines = evaluator(folder), json.loads((folder / "baselines.json").read_text())
    pipedream.solve(pipedream.read(folder / "pipedream" / "alexnet" / "graph.txt"), 4, GIGABYTE)
    for part in (splits, pipelines, tensor_parallel):
        out.print(part(folder, evaluate, baselines))


if __name__ == "__main__":
    main()
