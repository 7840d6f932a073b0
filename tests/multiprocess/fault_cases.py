"""Runs that are killed, frozen, filled up and resumed: ranks are forked, as torchrun would start them, for speed."""

import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from bapipe.errors import Stopped
from bapipe.formats.plan import Plan
from bapipe.formats.prediction import Memory, RankPrediction
from bapipe.tracing.layers import trace
from bapipe.training.checkpoint.manifest import read_manifest
from bapipe.training.checkpoint.writer import full_state_dict
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import StepReport
from bapipe.zoo.example import Example
from benchmarks.two_hosts.namespaces import two_hosts, why_not
from tests.multiprocess.launch_cases import classifier
from tests.multiprocess.runtime_cases import make_plan, named_order, random_order


def noisy() -> Example:
    """A model with running statistics and random numbers."""
    with torch.device("meta"):
        module = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(),
            nn.Linear(16, 3),
        )  # fmt: skip
    return classifier(module)


def quiet() -> Example:
    """One of which two layers share a weight."""
    with torch.device("meta"):
        module = nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )
    module[4].weight = module[2].weight
    return classifier(module)


def points() -> Dataset[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(50) % 3
    return TensorDataset(torch.randn(50, 4, generator=generator) + labels[:, None], labels)


def plan_of(build: Callable[[], Example], cuts: tuple[int, ...], ranks: tuple[int | tuple[int, ...], ...]) -> Plan:
    layers = [layer.name for layer in trace(build().module, build().tensors).layers]
    order = (
        random_order(1, ranks, 4, 0.5)
        if any(isinstance(r, tuple) for r in ranks)
        else named_order("1f1b", len(ranks), 4)
    )
    return make_plan(layers, cuts, ranks, order, 3, 4)


class Ranks:
    """The processes of one attempt; each leaves what its `train` returned or raised in a file."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        build: Callable[[], Example],
        config: TrainConfig,
        prepare: Callable[[int], None] = lambda rank: None,
        data: Callable[[], Dataset[tuple[Tensor, ...]]] = points,
    ) -> None:
        self.folder = folder
        for file in folder.glob("said.*"):
            file.unlink()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        size = sum(bool(actions) for actions in plan.order)
        self.pids: list[int] = []
        self.codes: list[int] = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
                os.environ["BAPIPE_JOB_SECRET"] = "known to this test"
                said, code = "crashed", 0
                try:
                    prepare(rank)
                    done = train(plan, build, data(), config, on_step=self._at)
                    said = json.dumps(done.losses)
                except BaseException as error:
                    said = f"{type(error).__name__}{' told' if getattr(error, 'told', False) else ''}: {error}"
                    if isinstance(error, Stopped):
                        code = 128 + error.number
                    elif "RunFailed" not in said:
                        traceback.print_exc()
                finally:
                    (folder / f"said.{rank}").write_text(said)
                    os._exit(code)
            self.pids.append(pid)

    def _at(self, report: StepReport) -> None:
        (self.folder / "step").write_text(str(report.step))

    def wait(self, patience_s: float = 60.0) -> list[str]:
        """Returns what each rank left; those that have not ended in time are ended, as torchrun does."""
        end_s = time.monotonic() + patience_s
        for rank, pid in enumerate(self.pids):
            while self.is_alive(rank) and time.monotonic() < end_s:
                time.sleep(0.005)
            os.kill(pid, signal.SIGKILL)
            self.codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        files = [self.folder / f"said.{rank}" for rank in range(len(self.pids))]
        return [file.read_text() if file.exists() else "" for file in files]

    def is_alive(self, rank: int) -> bool:
        return Path(f"/proc/{self.pids[rank]}/stat").read_text().split(") ")[1][0] != "Z"

    @property
    def last_step(self) -> int:
        """The last step that is done, in this attempt or an earlier one."""
        file = self.folder / "step"
        text = file.read_text() if file.exists() else ""
        return int(text) if text.isdigit() else 0

    def reached(self, step: int) -> None:
        """Returns when a step is done."""
        end_s = time.monotonic() + 20
        while self.last_step < step:
            assert time.monotonic() < end_s
            time.sleep(0.005)


def killed(folder: Path, seed: int = 5) -> dict[str, object]:
    """A run killed six times at random, whichever rank, and resumed, beside one that was left alone."""
    plan, training = plan_of(noisy, (4,), (0, 1)), TrainConfig(steps=40, learning_rate=0.01, optimizer="adamw", seed=3,
                                                           learning_rate_schedule="cosine", warmup_steps=5, clip_norm=0.5, timeout_s=20.0)  # fmt: skip
    alone = folder / "alone"
    start_s = time.monotonic()
    said = Ranks(folder, plan, noisy, replace(training, checkpoint=alone, checkpoint_every=2)).wait()
    duration_s = time.monotonic() - start_s
    assert json.loads(said[0]), said
    (folder / "step").unlink()
    rng, kills, attempts = random.Random(seed), 0, 0
    resumed = replace(training, checkpoint=folder / "killed", checkpoint_every=2, keep=2, resume=True)
    while kills < 6:
        attempts += 1
        assert attempts < 60
        ranks = Ranks(folder, plan, noisy, resumed)
        victim = rng.randrange(2)
        if attempts % 4:  # while it trains or writes; else while it starts
            ranks.reached(min(32, ranks.last_step + rng.randrange(5)))
            time.sleep(rng.uniform(0, 0.02))
        else:
            time.sleep(rng.uniform(0, duration_s / 8))
        if ranks.is_alive(victim):
            os.kill(ranks.pids[victim], signal.SIGKILL)
            kills += 1
        said = ranks.wait(patience_s=0.5)
        assert not said[0].startswith("["), "it reached its end before it was killed so often"
    said = Ranks(folder, plan, noisy, resumed).wait()
    same = _state(alone), _state(folder / "killed")
    return {
        "kills": kills,
        "steps_after_the_last": len(json.loads(said[0])),
        "equal": same[0].keys() == same[1].keys() and all(torch.equal(v, same[1][k]) for k, v in same[0].items()),
        "kept": sorted(path.name for path in (folder / "killed").iterdir()),
    }


def _state(folder: Path) -> dict[str, Tensor]:
    newest = sorted(folder.glob("step-*"))[-1]
    return full_state_dict(newest, read_manifest(newest))


def replanned(folder: Path) -> dict[str, object]:
    """A run that continues under other plans, compared with one that keeps its plan."""
    plans = [plan_of(quiet, (3,), (0, 1)), plan_of(quiet, (4,), ((0, 1), 2)), plan_of(quiet, (), (0,))]
    training = [
        TrainConfig(steps=steps, learning_rate=0.05, optimizer="adam", clip_norm=0.2, timeout_s=20.0)
        for steps in (5, 10, 15)
    ]
    said = Ranks(folder, plans[0], quiet, training[2]).wait()
    losses: list[float] = []
    for plan, until in zip(plans, training, strict=True):
        config = replace(until, checkpoint=folder / "replanned", resume=True)
        losses += json.loads(Ranks(folder, plan, quiet, config).wait()[0])
    return {"losses": losses, "alone": json.loads(said[0])}


def full_disk(folder: Path) -> list[str]:
    """Rank 1 may write small files only."""

    def prepare(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    training = TrainConfig(steps=100, timeout_s=4.0, checkpoint=folder / "full", checkpoint_every=4)
    plan = plan_of(quiet, (2,), (0, 1))
    said = Ranks(folder, plan, quiet, training, prepare).wait()
    return [*said, *(path.name for path in (folder / "full").glob("step-*"))]


def folders_apart(folder: Path) -> list[str]:
    """Each rank has a folder of its own under the name that is for checkpoints, as on hosts without a common disk."""

    def prepare(rank: int) -> None:
        (folder / f"host{rank}" / "own").mkdir(parents=True)
        os.chdir(folder / f"host{rank}")

    training = TrainConfig(steps=4, timeout_s=20.0, checkpoint=Path("own"), checkpoint_every=2)
    said = Ranks(folder, plan_of(quiet, (2,), (0, 1)), quiet, training, prepare).wait()
    return [*said, *(path.name for path in folder.glob("host*/own/*"))]


def frozen(folder: Path) -> dict[str, object]:
    """Rank 1 stops for good; rank 0 waits for two seconds."""
    ranks = Ranks(folder, plan_of(quiet, (2,), (0, 1)), quiet, TrainConfig(steps=10**6, timeout_s=2.0))
    ranks.reached(3)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    start_s = time.monotonic()
    os.waitpid(ranks.pids[0], 0)
    waited_s = time.monotonic() - start_s
    os.kill(ranks.pids[1], signal.SIGKILL)
    os.waitpid(ranks.pids[1], 0)
    return {"said": (folder / "said.0").read_text(), "waited_s": waited_s}


def one_killed(folder: Path) -> list[str]:
    """Of three ranks, one is killed while they train."""
    ranks = Ranks(folder, plan_of(quiet, (2, 4), (0, 1, 2)), quiet, TrainConfig(steps=10**6, timeout_s=20.0))
    ranks.reached(3)
    os.kill(ranks.pids[1], signal.SIGKILL)
    return ranks.wait()


def signalled(folder: Path) -> dict[str, object]:
    """Rank 1 gets SIGTERM while both train, each a process of its own."""
    training = TrainConfig(steps=10**6, timeout_s=20.0, checkpoint=folder / "stopped", checkpoint_every=10**6)
    ranks = Ranks(folder, plan_of(quiet, (2,), (0, 1)), quiet, training)
    ranks.reached(3)
    os.kill(ranks.pids[1], signal.SIGTERM)
    said = ranks.wait()
    return {"said": said, "codes": ranks.codes, "kept": [path.name for path in (folder / "stopped").glob("step-*")]}


def cut_off(folder: Path) -> dict[str, object]:
    """Two hosts, as namespaces, whose link is cut while they train; over a new one the run continues to its end."""
    reason = why_not()
    if reason is not None:
        return {"skipped": reason}
    training = TrainConfig(steps=40, learning_rate=0.01, optimizer="adamw", seed=3, clip_norm=0.5, timeout_s=20.0)
    plan, alone = plan_of(noisy, (4,), (0, 1)), replace(training, checkpoint=folder / "alone", checkpoint_every=2)
    Ranks(folder, plan, noisy, alone).wait()
    (folder / "step").unlink()
    resumed = replace(training, checkpoint=folder / "cut", checkpoint_every=2, resume=True)
    with two_hosts() as hosts:
        ranks = Ranks(folder, plan, noisy, replace(resumed, timeout_s=2.0), hosts.enter, slowly)
        ranks.reached(9)
        hosts.cut()
        start_s = time.monotonic()
        said = ranks.wait(20.0)
        waited_s = time.monotonic() - start_s
    with two_hosts() as hosts:
        again = Ranks(folder, plan, noisy, resumed, hosts.enter).wait()
    whole, parts = _state(folder / "alone"), _state(folder / "cut")
    return {
        "said": said,
        "waited_s": waited_s,
        "steps_after": len(json.loads(again[0])),
        "equal": whole.keys() == parts.keys() and all(torch.equal(v, parts[k]) for k, v in whole.items()),
    }


def slow_and_lossy(folder: Path) -> dict[str, object]:
    """Two hosts whose link takes 100 ms in each direction and loses 2 % of the packets."""
    reason = why_not()
    if reason is not None or not Path("/dev/net/tun").exists():
        return {"skipped": reason or "there is no /dev/net/tun here"}
    training, plan = TrainConfig(steps=2, timeout_s=20.0), plan_of(noisy, (4,), (0, 1))
    alone = Ranks(folder, plan, noisy, training).wait()
    with two_hosts(delay_ms=100, loss_percent=2) as hosts:
        return {"alone": alone, "said": Ranks(folder, plan, noisy, training, hosts.enter).wait()}


class Slow(Dataset[tuple[Tensor, ...]]):
    """The points, each after a millisecond."""

    def __init__(self) -> None:
        self._points = points()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        time.sleep(0.001)
        return self._points[place]


def slowly() -> Dataset[tuple[Tensor, ...]]:
    return Slow()


def not_a_number(folder: Path) -> list[str]:
    """The data has a hole."""

    def data() -> Dataset[tuple[Tensor, ...]]:
        x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
        x[7, 2] = float("nan")
        return TensorDataset(x, torch.arange(50) % 3)

    return Ranks(folder, plan_of(quiet, (2,), (0, 1)), quiet, TrainConfig(steps=20, timeout_s=20.0), data=data).wait()


def broken_update(folder: Path) -> list[str]:
    """An update that makes weights infinite, at a loss that is finite, right before a checkpoint."""
    training = TrainConfig(
        steps=1, learning_rate=1e3, optimizer="sgd", optimizer_arguments={"weight_decay": 1e38}, timeout_s=20.0,
        checkpoint=folder / "broken",
    )  # fmt: skip
    said = Ranks(folder, plan_of(quiet, (2,), (0, 1)), quiet, training).wait()
    return [*said, *(path.name for path in (folder / "broken").glob("step-*"))]


def labels_out_of_range(folder: Path) -> list[str]:
    """Labels that a model with three classes has no output for."""

    def data() -> Dataset[tuple[Tensor, ...]]:
        return TensorDataset(torch.zeros(50, 4), torch.full((50,), 7))

    training = TrainConfig(steps=20, timeout_s=20.0)
    return Ranks(folder, plan_of(quiet, (2,), (0, 1)), quiet, training, data=data).wait()


def raised(folder: Path) -> list[str]:
    """Rank 1's forward raises."""

    def forward(x: Tensor) -> Tensor:
        if not x.is_meta:
            raise RuntimeError("first line\nsecond line")
        return x.tanh()

    def prepare(rank: int) -> None:
        if rank == 1:
            nn.Tanh.forward = staticmethod(forward)  # type: ignore[method-assign, assignment]

    return Ranks(folder, plan_of(quiet, (2,), (0, 1)), quiet, TrainConfig(steps=20, timeout_s=20.0), prepare).wait()


def out_of_memory(folder: Path) -> list[str]:
    """Rank 1's forward wants more memory than any machine has."""

    def prepare(rank: int) -> None:
        if rank == 1:
            nn.Tanh.forward = lambda module, x: x if x.is_meta else torch.empty(10**15)  # type: ignore[method-assign, assignment]

    memory = Memory(params=5000, gradients=0, optimizer=0, stash=0, workspace=0, buffers=0)
    ranks = [
        RankPrediction(device=f"cpu{rank}", busy_ns=0, idle_ns=0, sync_ns=0, peak_bytes=5000, memory=memory)
        for rank in range(2)
    ]
    plan = plan_of(quiet, (2,), (0, 1))
    predicted = msgspec.structs.replace(plan, prediction=msgspec.structs.replace(plan.prediction, ranks=tuple(ranks)))
    return Ranks(folder, predicted, quiet, TrainConfig(steps=20, timeout_s=20.0), prepare).wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    import torch.distributed.pipelining  # each rank would import it

    gc.freeze()  # what is imported: each rank would look at all of it whenever it collects garbage
    results = {}
    for case in (
        killed,
        replanned,
        full_disk,
        folders_apart,
        frozen,
        one_killed,
        signalled,
        cut_off,
        slow_and_lossy,
        not_a_number,
        broken_update,
        labels_out_of_range,
        raised,
        out_of_memory,
    ):
        place = Path(sys.argv[1]) / case.__name__
        place.mkdir()
        start_s = time.monotonic()
        results[case.__name__] = case(place)
        print(f"{case.__name__}: {time.monotonic() - start_s:.1f} s", file=sys.stderr)
    print(json.dumps(results))
