"""Each option of planning, one by one: what reads it, and what plans for throughput and after a loss make of it."""

import ast
from collections.abc import Callable
from dataclasses import fields
from inspect import getdoc
from typing import Any

import pytest
import typer
from msgspec.structs import replace

import bapipe
from bapipe.cli import app
from bapipe.cli.flags import FLAGS, with_flags
from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.planner.inputs.options import PlanOptions
from tests.builders import chain, devices
from tests.sources import FILES, PACKAGE, calls_of, nodes_of

NAMES = {field.name for field in fields(PlanOptions)}

WITHOUT_FLAG = {"goal", "search_effort"}
"""The former has those of its parts; the latter is for measurements of the search."""

KEPT_AFTER_A_LOSS = {"minibatch_size", "microbatch_size", "schedules", "memory_limit_bytes", "memory_margin"}
NOT_KEPT_AFTER_A_LOSS = {
    "num_stages", "replicas", "recompute", "constraints", "objective", "time_limit_s", "search_effort", "group", "goal",
}  # fmt: skip
"""Replanning searches the shortest step on the devices that are left, whatever was asked of these."""

REFUSED_BY_THROUGHPUT = {
    "schedules": "gpipe",
    "num_stages": 2,
    "replicas": False,
    "constraints": "l0 with l1",
    "search_effort": 3.0,
}

KEPT_BY_THROUGHPUT: dict[str, tuple[Any, Callable[[Plan], bool]]] = {
    "minibatch_size": (8, lambda plan: plan.minibatch_size == 8),
    "microbatch_size": (1, lambda plan: plan.microbatch_size == 1),
    "memory_limit_bytes": (300, lambda plan: plan.prediction.peak_bytes <= 300),
    "memory_margin": (0.5, lambda plan: plan.prediction.peak_bytes <= 300),
    "goal": (bapipe.Goal(least="devices"), lambda plan: len(plan.used_devices) == 1),
}
"""A value of each, and whether a plan keeps to it: one without it does not."""

OF_THROUGHPUT_ANYHOW = {"objective", "recompute", "group", "time_limit_s"}
"""Itself; what none of its plans does; and what is settled for all searches before one of them begins."""


def test_every_option_is_read_by_a_search() -> None:
    planner = [path for path in FILES if path.is_relative_to(PACKAGE / "planner") and path.name != "options.py"]
    read = {node.attr for path in planner for node in nodes_of(path) if isinstance(node, ast.Attribute)}
    assert NAMES - read == set()


def test_every_option_has_a_flag_that_errors_name() -> None:
    assert NAMES - FLAGS.keys() == WITHOUT_FLAG


@pytest.mark.parametrize("command", ["plan", "compare", "explore"])
def test_the_help_of_every_option_is_its_documentation(command: str) -> None:
    """Of `schedules` the help lists the names instead, and some options of `explore` go with another one."""
    documented = with_flags(" ".join((getdoc(PlanOptions) or "").split())).lower()
    names = {FLAGS[name]: name for name in NAMES - WITHOUT_FLAG - {"schedules"}}
    found = set()
    for parameter in typer.main.get_command(app).commands[command].params:  # type: ignore[attr-defined]
        for name in {names[flag] for flag in (*parameter.opts, *parameter.secondary_opts) if flag in names}:
            if not parameter.help.startswith("With --"):
                found.add(name)
                assert f"{name}: {parameter.help.partition('.')[0].lower()}" in documented
    assert found == {*names.values()} if command == "plan" else "minibatch_size" in found


def test_every_option_is_kept_after_a_loss_or_known_not_to_be() -> None:
    calls = calls_of(PACKAGE / "training" / "replan.py")
    (given,) = [{keyword.arg for keyword in call.keywords} for called, call in calls if called == "PlanOptions"]
    assert given == KEPT_AFTER_A_LOSS
    assert sorted((*KEPT_AFTER_A_LOSS, *NOT_KEPT_AFTER_A_LOSS)) == sorted(NAMES)


def test_throughput_keeps_to_every_option_or_refuses_it() -> None:
    assert sorted((*REFUSED_BY_THROUGHPUT, *KEPT_BY_THROUGHPUT, *OF_THROUGHPUT_ANYHOW)) == sorted(NAMES)


def planned(**options: Any) -> Plan:
    """A plan for throughput on 3 devices of 600 bytes, of layers that hold 100 bytes for each sample."""
    profile = chain([1, 2, 3], stash_bytes=100)
    (one,) = profile.measurements
    two = tuple(replace(each, forward_ns=2 * each.forward_ns, stash_bytes=200) for each in one.layers)
    profile = replace(profile, measurements=(one, replace(one, microbatch_size=2, layers=two)))
    given = {"minibatch_size": 4, "objective": "throughput"} | options
    return bapipe.plan(profile, devices(3, memory_bytes=600), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REFUSED_BY_THROUGHPUT)
def test_throughput_refuses(name: str) -> None:
    with pytest.raises(BapipeError, match=f"`objective` throughput .*`{name}`"):
        planned(**{name: REFUSED_BY_THROUGHPUT[name]})


@pytest.mark.parametrize("name", KEPT_BY_THROUGHPUT)
def test_throughput_keeps_to(name: str) -> None:
    value, is_kept = KEPT_BY_THROUGHPUT[name]
    assert (is_kept(planned()), is_kept(planned(**{name: value}))) == (False, True)
