"""The worker of test_told_errors.py: loops of a user's own, in which one process fails, or calls what others do not."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from bapipe.errors import BapipeError
from bapipe.runtime import told_errors
from bapipe.runtime.pipeline import Pipeline
from bapipe.training.launch.worker import Rank
from tests.multiprocess.runtime_cases import make_plan, random_order

RANKS = (0, (1, 2), 3)
"""The devices of the stages, of which the one in the middle has replicas."""

ALONE = ((0, 1, 2, 3),)
"""The devices of the only stage of a pipeline, whose processes exchange gradients alone."""


def _raise(*_: Any) -> None:
    raise ValueError("of a hook")


def _broken(process: int, where: str, rank: int, pipeline: Pipeline) -> None:
    """Lets the layers of a process raise an error, forward or backward."""
    for module in pipeline.modules.values() if rank == process else ():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_pre_hook(_raise) if where == "forward" else part.weight.register_hook(_raise)


def _step(pipeline: Pipeline, num_samples: int = 4, num_targets: int = 4) -> float | None:
    return pipeline.step(torch.ones(num_samples, 4), target=torch.zeros(num_targets, 4))


def _refused_target(rank: int, pipeline: Pipeline) -> None:
    _step(pipeline, num_targets=3)


def _fails(process: int, where: str, rank: int, pipeline: Pipeline) -> None:
    _broken(process, where, rank, pipeline)
    _step(pipeline)


def _refused_evaluation(rank: int, pipeline: Pipeline) -> None:
    pipeline.evaluate(torch.ones(4 if rank else 3, 4), target=torch.zeros(4, 4))


def _refused_by_all(rank: int, pipeline: Pipeline) -> None:
    pipeline.start_step(torch.ones(4, 4), target=torch.zeros(4, 4), bucket=1)


def _evaluate(pipeline: Pipeline, num_samples: int = 4) -> None:
    batch = torch.ones(num_samples, 4)
    pipeline.evaluate(batch, target=torch.zeros(num_samples, 4), num_samples=num_samples)


def _one_evaluates(process: int, rank: int, pipeline: Pipeline) -> None:
    if rank == process:
        _evaluate(pipeline)
    _step(pipeline)


def _other_sizes(rank: int, pipeline: Pipeline) -> None:
    pipeline.start_step(torch.ones(4, 4), target=torch.zeros(4, 4))
    _evaluate(pipeline, 4 if rank else 2)


def _one_steps_more(rank: int, pipeline: Pipeline) -> None:
    _step(pipeline)
    if rank == 2:
        _step(pipeline)
    _evaluate(pipeline)  # of which process 1 notices nothing: it exchanges no tensors with process 2
    _step(pipeline)


def _gone(rank: int, pipeline: Pipeline) -> None:
    told_errors._STAY_S = 15.0  # process 0 stays for as long, as one of the others never hears of it
    if rank == 3:
        dist.destroy_process_group()
    else:
        _step(pipeline)


CASES: dict[str, Callable[[int, Pipeline], None]] = {
    "a target that the last stage refuses": _refused_target,
    "a forward of one replica": partial(_fails, 2, "forward"),
    "a backward, while others wait to clip": partial(_fails, 0, "backward"),
    "an evaluation that the first stage refuses": _refused_evaluation,
    "a bucket that all refuse": _refused_by_all,
    "the first process alone evaluates": partial(_one_evaluates, 0),
    "the last process alone evaluates": partial(_one_evaluates, 3),
    "one replica of an only stage evaluates": partial(_one_evaluates, 1),
    "evaluations of other sizes": _other_sizes,
    "a replica that steps once more": _one_steps_more,
    "the last process closes its connections": _gone,
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call has ended in a process: the type and the text of its error, empty without one.

    `again` is what a further step says, if there is one.
    """

    kind: str = ""
    text: str = ""
    again: str = ""


def own_loops(rank: Rank, folder: Path) -> dict[str, Ended]:
    """Returns how the call of each case has ended in this process."""
    dist.destroy_process_group()  # that of the job, which tells its ranks of errors itself
    told_errors._ANSWER_S = told_errors._STAY_S = 90.0  # however busy this machine is
    ended = {}
    for number, (name, case) in enumerate(CASES.items()):
        ranks = ALONE if "only stage" in name else RANKS
        ended[name] = _own_loop(rank.index, folder / str(number), case, ranks)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for who closes that of the job
    return ended


def _own_loop(
    rank: int, folder: Path, case: Callable[[int, Pipeline], None], ranks: Sequence[int | tuple[int, ...]]
) -> Ended:
    meeting = dist.FileStore(f"{folder}-meeting", 4)
    store = _served_store(rank, meeting)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    cuts, num = ((1, 2), 2) if ranks is RANKS else ((), 4)
    plan = make_plan(["0", "1", "2"], cuts, ranks, random_order(0, ranks, num, 0.0), 4 // num, num)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    examples = (torch.zeros(4, 4),)
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=examples, check=False, clip_norm=1.0, evaluates=True)
    _step(pipeline)
    ended = Ended()
    try:
        case(rank, pipeline)
    except Exception as error:
        ended = Ended(type(error).__name__, str(error))
    if ended.kind not in ("", "BapipeError") or case is CASES["a bucket that all refuse"]:
        ended = replace(ended, again=_again(pipeline))
    del pipeline
    if rank == 0:
        dist.destroy_process_group()  # the store ends with it
        del store
        gc.collect()
    _meet(meeting, rank)
    if dist.is_initialized():
        dist.destroy_process_group()
    return ended


def _again(pipeline: Pipeline) -> str:
    """Returns what a further step says."""
    try:
        _step(pipeline)
    except BapipeError as error:
        return str(error)
    return ""


def _served_store(rank: int, meeting: dist.Store) -> dist.Store:
    """Returns a store that process 0 serves, as torch does."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)


def _meet(meeting: dist.Store, rank: int) -> None:
    """Waits for all processes: none has ended its connections to the others before."""
    meeting.set(f"here{rank}", "")
    meeting.wait([f"here{other}" for other in range(4)])
