"""Reads mutated files of every kind, and lists every traceback, wrong success, and file beyond a limit.

    python -m benchmarks.fuzz --files 20000

Files are made from seeds, so each can be made again: `--kind trace --seed 1234 --files 1`. Batches run in forked
processes with limits: 5 s of processor time for a file, and 500 MB more memory than before the batch.
"""

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType

import msgspec

from bapipe.errors import BapipeError
from benchmarks import parser_of
from benchmarks.fuzz.group_kinds import group_kinds
from benchmarks.fuzz.kinds import Kind, WrongSuccess, kinds
from benchmarks.fuzz.mutate import mutated

BATCH = 200
MAX_S, MAX_BYTES = 5, 500 * 10**6


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What a process reports: outcomes of its files, the most memory it took, and the slowest file."""

    outcomes: dict[str, int]
    failures: list[str]
    added_bytes: int
    slowest_s: float


def make(kind: Kind, seed: int) -> bytes:
    """Returns the mutated file of a seed."""
    random = Random(f"{kind.name} {seed}")
    return mutated(random.choice(kind.seeds), random)


def outcome(kind: Kind, path: Path) -> str:
    """Returns `read` or `refused`; anything else is a failure, in words."""
    try:
        kind.use(path)
    except BapipeError as error:
        return "refused" if str(error) else "refused without a reason"
    except WrongSuccess as error:
        return f"wrong success: {error}"
    except TimeoutError:
        return f"more than {MAX_S} s"
    except MemoryError:
        return "out of memory"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"traceback: {type(error).__name__}: {str(error)[:120]} ({frame.filename}:{frame.lineno})"
    return "read"


def run_batch(kind: Kind, seeds: range, folder: Path) -> Batch:
    """Returns what becomes of some files; runs in a process of its own."""
    outcomes: Counter[str] = Counter()
    failures, slowest_s = [], 0.0
    before = _peak_bytes()
    signal.signal(signal.SIGPROF, _stop)
    for seed in seeds:
        path = folder / "file"
        path.write_bytes(make(kind, seed))
        start_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, MAX_S)
        result = outcome(kind, path)
        signal.setitimer(signal.ITIMER_PROF, 0)
        slowest_s = max(slowest_s, time.process_time() - start_s)
        outcomes[result if result in ("read", "refused") else "failed"] += 1
        if result not in ("read", "refused"):
            failures.append(f"{kind.name} {seed}: {result}")
    return Batch(outcomes=outcomes, failures=failures, added_bytes=_peak_bytes() - before, slowest_s=slowest_s)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _stop(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError


def forked(work: Callable[[], Batch]) -> Batch | None:
    """Returns what a function returns in a forked process; None if that died."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            limit = _address_bytes() + 2 * MAX_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            with os.fdopen(writing, "wb") as file:
                file.write(msgspec.json.encode(work()))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    return None if status else msgspec.json.decode(text, type=Batch)


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def run(chosen: list[Kind], num_files: int, first_seed: int) -> int:
    """Prints a line for each kind and each failure; returns the number of failures."""
    num_failures = 0
    print(f"{'kind':10} {'files':>7} {'read':>7} {'refused':>8} {'failed':>7} {'slowest s':>10} {'added MB':>9}")
    for kind in chosen:
        total: Counter[str] = Counter()
        failures: list[str] = []
        slowest_s, added_bytes = 0.0, 0
        seeds = range(first_seed, first_seed + -(-num_files // len(chosen)))
        with tempfile.TemporaryDirectory() as folder:
            for begin in range(0, len(seeds), BATCH):
                part = seeds[begin : begin + BATCH]
                batch = forked(lambda kind=kind, part=part, at=Path(folder): run_batch(kind, part, at))  # type: ignore[misc]
                if batch is None:
                    failures.append(f"{kind.name} {part[0]} to {part[-1]}: the process died")
                    continue
                total.update(batch.outcomes)
                failures += batch.failures
                slowest_s, added_bytes = max(slowest_s, batch.slowest_s), max(added_bytes, batch.added_bytes)
                if batch.added_bytes > MAX_BYTES:
                    failures.append(f"{kind.name} {part[0]} to {part[-1]}: {batch.added_bytes / 1e6:.0f} MB more")
        counts = f"{total['read']:>7} {total['refused']:>8} {len(failures):>7}"
        print(f"{kind.name:10} {len(seeds):>7} {counts} {slowest_s:>10.2f} {added_bytes / 1e6:>9.0f}", flush=True)
        for failure in failures:
            print(f"  {failure}", flush=True)
        num_failures += len(failures)
    return num_failures


def all_kinds(folder: Path) -> tuple[Kind, ...]:
    """Returns every kind, with intact files for some of them in a folder."""
    # These load torch, which the other kinds must not need.
    from benchmarks.fuzz.data_kinds import data_kinds
    from benchmarks.fuzz.torch_kinds import torch_kinds

    return (*kinds(), *group_kinds(), *torch_kinds(folder), *data_kinds())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _main(all_kinds(Path(folder)))


def _main(known: tuple[Kind, ...]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=[kind.name for kind in known])
    given = parser.parse_args()
    chosen = [kind for kind in known if given.kind in (None, kind.name)]
    sys.exit(1 if run(chosen, given.files, given.seed) else 0)


if __name__ == "__main__":
    main()
