"""A long run that must not grow: memory, open files and threads of all its processes over time.

    python -m benchmarks.soak FOLDER [--minutes 60] [--every 10] [--model vgg16] [--arg KEY=VALUE ...]

It trains with checkpoints, evaluation and data workers, writes what each process uses to FOLDER/samples.csv, and ends
the run by SIGTERM, after which nothing may be left running. It fails if in the last quarter of the time a process has
more files or threads than in the second, or more memory than 2 % and 8 MB above.
"""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bapipe.report.formatting import mib
from benchmarks import parser_of

CLI = [sys.executable, "-m", "bapipe"]

ALLOWED = {"memory_bytes": (1.02, 8 * 2**20), "num_files": (1.0, 2), "num_threads": (1.0, 0)}
"""How much there may be more: by a factor, and by a number."""

PAGE_BYTES = 4096

END_S = 600
"""How long the run may take to end: on a busy machine, a step and a checkpoint at low priority take minutes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process uses at one moment."""

    memory_bytes: int
    num_files: int
    num_threads: int


def sample(pid: int) -> Sample:
    """Returns what a process uses."""
    folder = Path(f"/proc/{pid}")
    return Sample(
        int((folder / "statm").read_text().split()[1]) * PAGE_BYTES,
        len(list((folder / "fd").iterdir())),
        len(list((folder / "task").iterdir())),
    )


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, from any of its threads, the first one first."""
    started: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        started |= {int(child) for child in (thread / "children").read_text().split()}
    return sorted(started)


def job_processes(run_pid: int) -> dict[str, int]:
    """Returns all processes of a run by name: the parent, each rank, and what each rank has started."""
    processes = {"parent": run_pid}
    for rank, rank_pid in enumerate(children(run_pid)):
        processes[f"rank {rank}"] = rank_pid
        for pid in children(rank_pid):
            is_tracker = b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
            processes[f"{'tracker' if is_tracker else 'data worker'} of rank {rank}"] = pid
    return processes


def watch(
    run: "subprocess.Popen[bytes]", checkpoints: Path, record: Path, duration_s: float, every_s: float
) -> dict[str, list[Sample]]:
    """Returns the samples of every process from the first checkpoint on, and writes them to `record` as CSV."""
    samples: dict[str, list[Sample]] = {}
    while run.poll() is None and not list(checkpoints.glob("step-*")):
        time.sleep(1)
    begin_s = time.monotonic()
    with record.open("w", buffering=1) as file:
        print("seconds,process,memory_bytes,num_files,num_threads", file=file)
        while time.monotonic() < begin_s + duration_s:
            time.sleep(every_s)
            if run.poll() is not None:
                raise RuntimeError(f"the run ended by itself, with code {run.returncode}")
            for name, one in sample_all(run.pid).items():
                samples.setdefault(name, []).append(one)
                row = (f"{time.monotonic() - begin_s:.0f}", name, one.memory_bytes, one.num_files, one.num_threads)
                print(*row, sep=",", file=file)
    return samples


def sample_all(run_pid: int) -> dict[str, Sample]:
    """Returns what every process of a run uses, or nothing while a process is starting or ending."""
    try:
        return {name: sample(pid) for name, pid in job_processes(run_pid).items()}
    except OSError:
        return {}


def last_line(log: Path) -> str:
    """Returns the last line that the run has written."""
    return log.read_text().splitlines()[-1]


def growth(name: str, samples: list[Sample]) -> list[str]:
    """Prints what a process used in the second and the last quarter; returns what has grown."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    grown = []
    for what, (factor, extra) in ALLOWED.items():
        before, after = (median(getattr(one, what) for one in part) for part in (early, late))
        values = " -> ".join(mib(value) if what == "memory_bytes" else f"{value:g}" for value in (before, after))
        print(f"{name:22} {what:12} {values}")
        grown += [f"{name}: {what} {values}"] if after > before * factor + extra else []
    return grown


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="seconds between two samples")
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--arg", action="append", default=[])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    plan, profile = given.folder / "plan.json", given.folder / "profile.json"
    arguments = [part for text in given.arg for part in ("--arg", text)]
    if not plan.exists():
        measure = [*CLI, "profile", given.model, *arguments, "--microbatch-size", "2,4", "-o", str(profile)]
        subprocess.run(measure, check=True)
        subprocess.run(
            [*CLI, "plan", str(profile), "--devices", "2", "--stages", "2", "--minibatch-size", "8", "-o", str(plan)],
            check=True,
        )
    options = ["--steps", "100000000", "--checkpoint", str(given.folder / "kept"), "--checkpoint-every", "50"]
    options += ["--eval-every", "100", "--eval-samples", "16", "--data-workers", "1", "--resume"]
    options += ["--trust-factory", given.model] if ":" in given.model else []
    run = subprocess.Popen([*CLI, "run", str(plan), *options], stderr=(given.folder / "log").open("wb"))
    try:
        samples = watch(run, given.folder / "kept", given.folder / "samples.csv", 60 * given.minutes, given.every)
        processes = job_processes(run.pid)
        run.send_signal(signal.SIGTERM)
        code = run.wait(END_S)
    finally:
        run.kill()
    faults = [fault for name, values in samples.items() for fault in growth(name, values)]
    faults += [f"{name} still runs" for name, pid in processes.items() if Path(f"/proc/{pid}").exists()]
    faults += [] if code == 128 + signal.SIGTERM else [f"the run ended with code {code}"]
    print(last_line(given.folder / "log"))
    sys.exit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
