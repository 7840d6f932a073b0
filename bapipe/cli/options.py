"""Options that several commands share, and how their texts are parsed."""

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from bapipe.cli.attribute_docs import attribute_docs
from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats.strict_json import json_or_text
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import MAX_DEVICES
from bapipe.schedules import ALL, SIDE_BY_SIDE

PLAN_HELP = attribute_docs(PlanOptions)
"""The help of the options of planning, by their names in `PlanOptions`."""

Output = Annotated[Path, typer.Option("-o", "--output", help="File to write.", dir_okay=False)]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        max=MAX_DEVICES,
        help="Number of devices like the profiled one, with an assumed link. Default on a CPU: this machine's cores.",
    ),
]
Kind = Annotated[str, typer.Option("--device", help="Kind of device: cpu or cuda.")]
ModelDevice = Annotated[str, typer.Option("--device", help="Where to measure a named model: cpu or cuda.")]
Arguments = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the model's factory. May be repeated."),
]
DEFAULT_MINIBATCH_SIZE = 32
Minibatch = Annotated[int, typer.Option("--minibatch-size", min=1, help=PLAN_HELP["minibatch_size"])]
MinibatchIfGiven = Annotated[
    int | None,
    typer.Option(
        "--minibatch-size",
        min=1,
        help=f"{PLAN_HELP['minibatch_size']} Default: {DEFAULT_MINIBATCH_SIZE}, or that of the plan given.",
    ),
]
Sizes = Annotated[
    str, typer.Option("--microbatch-size", help="Micro-batch sizes to measure, in samples, such as 1,2,4,8.")
]
Sources = Annotated[
    list[str],
    typer.Argument(metavar="PROFILE...|MODEL", help="One profile per kind of device, or a model to profile."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="Cluster file, for devices and links that are known. Default: see --devices."),
]
Microbatch = Annotated[int | None, typer.Option("--microbatch-size", min=1, help=PLAN_HELP["microbatch_size"])]
UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 10**3), ("ib", 2**10))
}
"""Bytes in each unit that a size may have."""


def num_bytes(text: str) -> int:
    """Returns the bytes in a text such as 2000000000, 2GB or 1.5 GiB."""
    if re.search(r"[KMGT]i?b$", text.strip()):
        raise typer.BadParameter(f"'{text[:80]}' may be of bits: write it in bytes, with a large B")
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) *([kmgt]i?b|b?)", text.strip(), flags=re.IGNORECASE)
    size = 0 if match is None else int(Fraction(match[1]) * UNITS[match[2].lower()])
    if size < 1:
        units = "KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        raise typer.BadParameter(f"'{text[:80]}' is not a size: want bytes, or a number with {units}")
    return size


MemoryLimit = Annotated[
    int | None,
    typer.Option(
        "--memory-limit",
        parser=num_bytes,
        metavar="BYTES",
        help=f"{PLAN_HELP['memory_limit_bytes']} For example 2000000000 or 2GB.",
    ),
]
SCHEDULES = f"{', '.join(ALL)}, or all (but {', '.join(sorted(SIDE_BY_SIDE))})"
"""What `--schedule` takes, in words."""

Replicas = Annotated[bool, typer.Option("--replicas/--no-replicas", help=PLAN_HELP["replicas"])]
Recompute = Annotated[
    bool,
    typer.Option("--recompute/--no-recompute", help=PLAN_HELP["recompute"]),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        min=0.0,
        help=PLAN_HELP["time_limit_s"],
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


MAX_MICROBATCH_SIZE = 2**20
"""Largest micro-batch that is measured or scaled to."""

MAX_THREADS = 4096
"""Largest number of threads, or of processes, that an option asks for."""


def integers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a list such as 1,2,4."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise BapipeError(f"'{text[:80]}' is not a list of different positive integers such as 1,2,4,8")
    if max(values) > MAX_MICROBATCH_SIZE:
        raise BapipeError(f"'{text[:80]}': want micro-batches of at most {MAX_MICROBATCH_SIZE:,} samples")
    return values


def key_values(pairs: list[str] | None, option: str = "--arg", such_as: str = "image_size=64") -> dict[str, object]:
    """Returns KEY=VALUE pairs; a value that is valid JSON is decoded, anything else is text."""
    arguments: dict[str, object] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BapipeError(f"{option} {pair}: want KEY=VALUE, such as {such_as}")
        try:
            arguments[key] = json_or_text(text)
        except InvalidFile as error:
            raise BapipeError(f"{option} {key}: {error.message}") from None
    return arguments


def schedule_names(schedules: str) -> tuple[str, ...]:
    """Returns the names in a list such as `1f1b,gpipe`."""
    return tuple(name.strip() for name in schedules.split(","))
