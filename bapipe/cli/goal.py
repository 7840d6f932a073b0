"""The goals of `bapipe plan` besides the shortest step, as options."""

import re
from decimal import Decimal
from typing import Annotated, Literal

import typer

from bapipe.errors import BapipeError
from bapipe.planner.inputs.goal import Goal


def share(text: str) -> float:
    """Returns the share in a text such as 5% or 0.05."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?) *(%?)", text.strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is not a share: want one such as 5% or 0.05")
    value = float(match[1])
    if not match[2] and value > 1:
        raise typer.BadParameter(
            f"'{text}' would be {value:.0%}: use {value / 100:g} or {value:g}%; more than the whole needs the %"
        )
    return float(Decimal(match[1]) / (100 if match[2] else 1))  # 0.7 / 100 would be less than 0.007


Least = Annotated[
    Literal["memory", "devices"] | None,
    typer.Option("--least", help="Find the plan that needs least memory a device, or the fewest devices."),
]
Largest = Annotated[
    str | None,
    typer.Option(
        "--largest",
        metavar="BLOCK",
        help="Find how many copies of a block of layers fit, in a model of at most 2,000 layers: a layer, what names "
        "begin with, or FIRST..LAST.",
    ),
]
Within = Annotated[
    float | None,
    typer.Option(
        "--within",
        parser=share,
        metavar="SHARE",
        help="With --least: how much slower than the fastest plan, such as 5%.",
    ),
]
MinThroughput = Annotated[
    float | None,
    typer.Option("--min-throughput", help="With --least or --largest: the samples per second that a plan must reach."),
]


def goal_of(
    least: Literal["memory", "devices"] | None,
    largest: str | None,
    within: float | None,
    min_throughput: float | None,
) -> Goal | None:
    """Returns the goal that some options ask for, None for the shortest step."""
    if least is None and largest is None:
        if within is not None or min_throughput is not None:
            raise BapipeError(
                "--within and --min-throughput say how fast a plan must be: add --least memory, --least devices or "
                "--largest BLOCK"
            )
        return None
    return Goal(least=least, largest=largest, within=within, min_throughput=min_throughput)
