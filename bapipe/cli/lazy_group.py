"""A group of commands, each of which is imported when it is called: `bapipe --help` imports none of them."""

import signal
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from bapipe.errors import Stopped

COMMANDS: dict[str, tuple[str, str]] = {
    "profile": ("bapipe.cli.profile:profile", "Measure the time and memory of each layer of a model."),
    "import": ("bapipe.cli.profile:import_", "Convert a profile that another tool measured."),
    "estimate": (
        "bapipe.cli.estimate:estimate",
        "Estimate the profile of a group of devices from that of a single one.",
    ),
    "cluster": ("bapipe.cli.profile:cluster", "List the devices of this machine or job, and measure their links."),
    "plan": ("bapipe.cli.plan:plan", "Find the fastest plan, and prove how good it is."),
    "compare": ("bapipe.cli.compare:compare", "Compare the best plan of each schedule with the baselines."),
    "edit": ("bapipe.cli.edit:edit", "Change a plan by hand, and see what that changes."),
    "explore": (
        "bapipe.cli.explore:explore",
        "Show a plan on a page of this machine, change it with the mouse, and see what happens.",
    ),
    "simulate": ("bapipe.cli.simulate:simulate", "Predict the time and memory of one step of a plan."),
    "show": ("bapipe.cli.show:show", "Show a profile, a cluster or a plan, or the difference of two."),
    "run": ("bapipe.cli.run:run", "Train a model exactly as its plan says, with one process per device."),
    "doctor": (
        "bapipe.cli.doctor:doctor",
        "Say what this machine has for planning and training, and what will not work here.",
    ),
    "export": ("bapipe.cli.run:export", "Write the weights of a checkpoint as a safetensors file."),
    "convert-checkpoint": (
        "bapipe.cli.run:convert_checkpoint",
        "Convert checkpoints of an older version, without running code in them.",
    ),
}
"""The function behind each command, as `module:function`, and its line in `bapipe --help`."""


RENAMED = {"profile": {"fine": "operator-layers", "neighbours": "co-runners", "whole": "leaf-module"}}
"""The options of each command that had another name in version 0.1: the old spelling still works."""


class LazyCommands(MutableMapping[str, Any]):
    """The commands by name; a command is imported and converted when it is looked up."""

    def __init__(self, handlers: Mapping[str, tuple[str, str]]) -> None:
        self._handlers = handlers
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            path, short_help = self._handlers[name]
            module, _, function = path.partition(":")
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            renamed = RENAMED.get(name, {})
            settings = {"token_normalize_func": lambda token: renamed.get(token, token)}
            single.command(name, short_help=short_help, context_settings=settings)(
                getattr(import_module(module), function)
            )
            self._loaded[name] = typer.main.get_command(single)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError("commands cannot be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)


class LazyGroup(TyperGroup):
    """The `bapipe` command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands(COMMANDS)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; Ctrl-C ends it as other signals do, instead of with typer's own message and exit code 1.

        What the exception says, such as that a part is stored, is said, too.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interruption:
            raise Stopped(signal.SIGINT, f"; {interruption}" if str(interruption) else "") from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands from `COMMANDS`, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in COMMANDS.items()])
