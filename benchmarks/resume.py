"""Runs that are killed, and checkpoints that are damaged: whether training ends with the weights of a run left alone.

    python -m benchmarks.resume [--kills 100] [--damages 200] [--seed 0]

Every kill ends a random rank of two at a random moment: while it starts, trains or writes a checkpoint. Every damage
changes, shortens, lengthens, empties or removes a random file of the newest checkpoint; training then has to continue
from the one before. It fails at the first run whose weights differ in a bit.
"""

import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from bapipe.training.checkpoint.folder import list_checkpoints
from bapipe.training.checkpoint.manifest import read_manifest
from bapipe.training.checkpoint.writer import full_state_dict
from benchmarks import parser_of
from tests.multiprocess.fault_cases import killed
from tests.training.checkpoint.cases import go

KILLS_PER_RUN = 12
STEPS, STEPS_MORE = 6, 8


def damage(checkpoint: Path, rng: random.Random) -> str:
    """Damages one file of a checkpoint; returns how."""
    file = rng.choice(sorted(checkpoint.iterdir()))
    content = bytearray(file.read_bytes())
    how = rng.choice(["bit", "bytes", "cut", "longer", "empty", "removed"])
    if how == "removed":
        file.unlink()
        return how
    place = rng.randrange(len(content))
    if how == "bit":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "bytes":
        end = min(place + rng.randint(1, 64), len(content))
        content[place:end] = bytes(255 - value for value in content[place:end])
    elif how == "cut":
        del content[place:]
    elif how == "longer":
        content += os.urandom(rng.randint(1, 64))
    else:
        content.clear()
    file.write_bytes(content)
    return how


def state(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of the newest checkpoint."""
    newest = list_checkpoints(folder)[-1]
    return full_state_dict(newest, read_manifest(newest))


def is_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def kill(count: int, seed: int, folder: Path) -> int:
    """Kills runs of a dozen kills each until there are enough; returns how many."""
    done = 0
    while done < count:
        place = folder / f"kills-{done}"
        place.mkdir()
        found = killed(place, seed + done)
        if not found["equal"]:
            raise SystemExit(f"the run of seed {seed + done} ended with other weights")
        shutil.rmtree(place)
        done += KILLS_PER_RUN
        print(f"{done} kills", file=sys.stderr, flush=True)
    return done


def damage_and_resume(count: int, seed: int, folder: Path) -> Counter[str]:
    """Damages the newest checkpoint of one run after another, and continues; returns how often each damage occurred."""
    go(folder / "begun", STEPS)
    shutil.copytree(folder / "begun", folder / "alone")
    go(folder / "alone", STEPS_MORE)
    want, kinds = state(folder / "alone"), Counter[str]()
    for i in range(count):
        place, rng = folder / f"damage-{i}", random.Random(seed + i)
        shutil.copytree(folder / "begun", place)
        how = damage(list_checkpoints(place)[-1], rng)
        result = go(place, STEPS_MORE)
        if len(result.losses) <= STEPS_MORE - STEPS or not is_equal(state(place), want):
            raise SystemExit(f"damage {i} ({how}) was not noticed, or training ended with other weights")
        kinds[how] += 1
        shutil.rmtree(place)
    return kinds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # each damage is told
    with tempfile.TemporaryDirectory() as temporary:
        kinds = damage_and_resume(given.damages, given.seed, Path(temporary))
        text = ", ".join(f"{how} {number}" for how, number in sorted(kinds.items()))
        print(f"{given.damages} damaged checkpoints, none believed, all runs ended with equal weights: {text}")
        print(f"{kill(given.kills, given.seed, Path(temporary))} kills, all runs ended with equal weights")


if __name__ == "__main__":
    main()
