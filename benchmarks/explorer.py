"""How long the explorer takes: a change while a cut is dragged, a page, its file, a sweep, and `bapipe show` of files.

    python -m benchmarks.explorer [--sweep]

The plans: 8 devices, 64 micro-batches and 100 layers; 64 devices, 256 micro-batches and 2,000 layers. With Chromium,
from the movement of the mouse to the page that shows the new step; without it, simulation alone. `show` is measured in
CPU seconds of its process, the second time, when its modules are compiled. `--sweep`: 98 plans for ResNet-50 on 2 to
8 devices.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from bapipe.explorer.document import standalone_page
from bapipe.explorer.server import Server
from bapipe.explorer.session import Session
from bapipe.explorer.state import State
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.codec import write
from bapipe.formats.profile import ModelProfile
from benchmarks import parser_of
from tests import ROOT
from tests.builders import chain
from tests.explorer.chromium import PATH, Browser

NUM_DRAGS = 15

OBSERVE = """(() => {
  let begun = 0;
  window.took = [];
  addEventListener('pointermove', () => { begun = performance.now() }, true);
  new MutationObserver(() => requestAnimationFrame(() => setTimeout(() => took.push(performance.now() - begun))))
    .observe(document.getElementById('figures'), {attributes: true, attributeFilter: ['data-step']});
})()"""
"""Notes the milliseconds from a movement of the pointer until the frame that shows its step has been drawn."""

MIDDLE_OF_CUT = """(() => {
  const b = document.querySelector('.cut').getBoundingClientRect();
  return [b.x + 40, b.y + 6, Math.max(8, document.querySelector('.space').clientHeight / %d)];
})()"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan of so many devices, micro-batches and layers."""

    num_devices: int
    num_microbatches: int
    num_layers: int

    @property
    def profile(self) -> ModelProfile:
        random = Random(1)
        times_ms = [random.randint(1, 6) for _ in range(self.num_layers)]
        return chain(times_ms, param_bytes=10**6, stash_bytes=10**5, output_bytes=10**5)

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            devices=tuple(
                Device(name=f"gpu{i}", host=f"h{i // 8}", kind="a", memory_bytes=10**11, overlaps_transfers=True)
                for i in range(self.num_devices)
            ),
            intra_host=Bandwidth(bytes_per_s=100 * 10**9, latency_ns=5_000),
            inter_host=Bandwidth(bytes_per_s=10 * 10**9, latency_ns=20_000),
        )


CASES = (
    Case(num_devices=8, num_microbatches=64, num_layers=100),
    Case(num_devices=64, num_microbatches=256, num_layers=2_000),
)


def drag_ms(browser: Browser, num_layers: int) -> float:
    """Returns the median of the milliseconds from a movement of a dragged cut until the page shows its step."""
    browser.value(OBSERVE)
    x, y, row = browser.value(MIDDLE_OF_CUT % num_layers)
    browser.mouse("mousePressed", x, y)
    for move in range(NUM_DRAGS):
        browser.mouse("mouseMoved", x, y + row * (1 + move % 3))
        browser.wait(f"took.length > {move}")
    browser.mouse("mouseReleased", x, y + row)
    took: list[float] = browser.value("took")
    return median(took)


def measured_page(case: Case, session: Session) -> tuple[str, str]:
    """Returns how long a page takes to open and to follow a dragged cut, in words."""
    if PATH is None:
        return "no Chromium", "no Chromium"
    with Server(session) as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with Browser(Path(folder), allowed=server.address) as browser:
            begin = time.perf_counter()
            browser.open(server.address)
            opened_s = time.perf_counter() - begin
            found = f"{opened_s:.2f} s", f"{drag_ms(browser, case.num_layers):.0f} ms"
            assert not browser.problems, browser.problems
        server.shutdown()
    return found


def cpu_ms(call: Callable[[], object]) -> float:
    """Returns the milliseconds of compute of a call: the median of five."""
    times = []
    for _ in range(5):
        begin = time.process_time()
        call()
        times.append((time.process_time() - begin) * 1e3)
    return median(times)


def moved(state: State) -> State:
    return replace(state, cuts=(state.cuts[0] + 1, *state.cuts[1:]))


def show_pages() -> None:
    table = Table("devices", "micro-batches", "layers", "simulated", "redrawn", "opened", "file", title="the page")
    for case in CASES:
        session = Session({"a": case.profile}, case.cluster, case.num_microbatches)
        state = moved(session.first)
        gc.set_threshold(50_000)  # as `bapipe explore` does, and the freezing too
        gc.freeze()
        simulated_ms = cpu_ms(lambda session=session, state=state: session.judge(state, detailed=False))  # type: ignore[misc]
        opened, redrawn = measured_page(case, session)
        size = len(standalone_page(session, session.first, (("start", session.first),)))
        numbers = case.num_devices, case.num_microbatches, case.num_layers
        table.add_row(*map(str, numbers), f"{simulated_ms:.0f} ms CPU", redrawn, opened, f"{size / 1e6:.2f} MB")
    Console().print(table)


def show_commands(folder: Path) -> None:
    """Prints the compute of `bapipe show` of some files, and of other commands that only read."""
    files = [ROOT / "profiles" / "cpu" / name for name in ("vgg16.json", "resnet50.json", "gpt2.json")]
    for case in CASES:
        session = Session({"a": case.profile}, case.cluster, case.num_microbatches)
        name = f"{case.num_devices}x{case.num_microbatches}"
        write(folder / f"plan-{name}.json", session.plan(session.first))
        write(folder / f"profile-{name}.json", case.profile)
        files += [folder / f"plan-{name}.json", folder / f"profile-{name}.json"]
    table = Table("command", "CPU s", title="commands that only read")
    # As for a user, the second start finds the modules compiled.
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPYCACHEPREFIX": str(folder / "modules")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for arguments in [["--help"], *(["show", str(file)] for file in files)]:
        for _ in range(2):  # the second time, from a warm disk
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, "-m", "bapipe", *arguments],
                stdout=subprocess.DEVNULL,
                check=True,
                env=environment,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        table.add_row(" ".join([*arguments[:-1], Path(arguments[-1]).name]), f"{spent_s:.2f}")
    Console().print(table)


def show_sweep(folder: Path) -> None:
    """Prints how long 98 points for ResNet-50 take, and the gaps that their searches leave."""
    links = "0.125,0.18,0.25,0.35,0.5,0.7,1,1.4,2,2.8,4,5.6,8,16"
    options = ["--devices", "8", "--minibatch-size", "32", "--json", "--vary", f"link={links}"]
    options += ["--vary", "devices=2..8"]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bapipe", "explore", str(ROOT / "profiles" / "cpu" / "resnet50.json"), *options],
        stdout=subprocess.PIPE,
        check=True,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "sweep")},
    )
    took_s = time.perf_counter() - begin
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    gaps = sorted(point["gap"] for point in json.loads(done.stdout))
    near = sum(gap <= 0.005 for gap in gaps)
    spent_s = cpu.ru_utime + cpu.ru_stime
    Console().print(
        f"{len(gaps)} points for ResNet-50: {took_s:.0f} s, {spent_s:.0f} CPU s; {near} within 0.5 % of the bound, the "
        f"largest gap {gaps[-1]:.1%}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sweep", action="store_true", help="only plan 98 points for ResNet-50")
    with tempfile.TemporaryDirectory() as folder:
        if parser.parse_args().sweep:
            show_sweep(Path(folder))
            return
        show_pages()
        show_commands(Path(folder))


if __name__ == "__main__":
    main()
