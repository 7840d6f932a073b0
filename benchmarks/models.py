"""Trains every architecture of the tests in stages, and writes the table of models in docs/models.md.

    python -m benchmarks.models

Each is traced once, cut at three random places, and trained in one process: whole backwards, zero bubble (I and W
apart), and zero bubble with recomputation. Loss, every gradient and every buffer are compared with the model's own
code's.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bapipe.errors import BapipeError
from bapipe.tracing.model import TracedModel
from tests.models.architectures import ARCHITECTURES, Architecture
from tests.models.in_one_process import OneProcess, Setting, largest_error, whole_step
from tests.models.random_partitions import Trained

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- made by python -m benchmarks.models: begin -->", "<!-- end -->"
SETTINGS = {
    "whole backwards": Setting(seed=1),
    "zero bubble": Setting(seed=2, split=True),
    "zero bubble, recomputation": Setting(seed=3, split=True, recompute=True),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model: how many layers it has, how many of these are whole modules, and what came of each setting."""

    name: str
    class_name: str
    num_layers: int
    num_leaves: int
    outcomes: tuple[str, ...]

    @property
    def works(self) -> bool:
        return all(outcome == "equal" for outcome in self.outcomes)


def train(name: str, make: Callable[[], Architecture]) -> Row:
    """Trains an architecture under every setting."""
    architecture = make()
    want = whole_step(architecture)
    try:
        model = OneProcess(architecture)
    except BapipeError as error:
        return _row(name, architecture, None, [f"refused: {error}"] * len(SETTINGS))
    outcomes = [_outcome(model, setting, want) for setting in SETTINGS.values()]
    return _row(name, architecture, model.model, outcomes)


def _outcome(model: OneProcess, setting: Setting, want: Trained) -> str:
    try:
        what, error = largest_error(model.step(setting), want)
    except BapipeError as refusal:
        return f"refused: {refusal}"
    except Exception as failure:  # whatever torch or the model raises
        return f"fails: {type(failure).__name__}"
    limit = 1e-5 if any(grad.dtype == torch.float32 for grad in want.grads.values()) else 1e-11
    return "equal" if error <= (max(limit, 1e-7) if what == "loss" else limit) else f"differs: {what}, {error:.0e}"


def _row(name: str, architecture: Architecture, model: TracedModel | None, outcomes: Sequence[str]) -> Row:
    return Row(
        name=name,
        class_name=type(architecture.module).__name__,
        num_layers=0 if model is None else len(model.layers),
        num_leaves=0 if model is None else len(model.leaf_reasons),
        outcomes=tuple(outcomes),
    )


def table(rows: Sequence[Row]) -> str:
    """Returns the rows in Markdown, with the count of what works."""
    lines = [
        f"{sum(row.works for row in rows)} of {len(rows)} architectures train with the loss, gradients and buffers of "
        "their own code, to 1e-11 in float64 (1e-5 for those of float32):",
        "",
        f"| architecture | class | layers | of these, modules whose code is not traced | {' | '.join(SETTINGS)} |",
        "|---|---|---|---|" + "---|" * len(SETTINGS),
    ]
    for row in rows:
        outcomes = " | ".join(row.outcomes)
        lines.append(f"| {row.name} | {row.class_name} | {row.num_layers} | {row.num_leaves or ''} | {outcomes} |")
    return "\n".join(lines)


def main() -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for name, make in ARCHITECTURES.items():
        rows.append(train(name, make))
        print(f"{name}: {', '.join(rows[-1].outcomes)}", flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
