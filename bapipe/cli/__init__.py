"""The command line: one handler function per command; the only place that prints and picks exit codes.

`lazy_group.COMMANDS` lists the commands with their handlers: each is in a file of its name, but for `profile.py` (also
import and cluster) and `run.py` (also export and convert-checkpoint). `options.py` holds the options that several
commands share, `inputs.py` turns their texts into profiles, clusters and plans, `outputs.py` writes what they make,
`printing.py` prints, `progress.py` shows the progress of long commands, and `flags.py` translates errors of the
library, which name arguments, into the flags that set these.
"""

import gc
import io
import logging
import sys
from typing import Annotated

import typer

from bapipe.cli.environment import forget_wrong_sizes, open_closed_streams
from bapipe.cli.flags import with_flags
from bapipe.cli.lazy_group import LazyGroup
from bapipe.cli.system_errors import system_error_text
from bapipe.errors import BapipeError, Infeasible, RunFailed, Stopped, first_line, is_without_memory, is_without_threads
from bapipe.printable import MAX_LINE, printable
from bapipe.stop_signals import raise_on_signals
from bapipe.torchrun import is_first_rank

app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # formatting help with rich would double its time
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"bapipe {version('bapipe')}")
        raise typer.Exit


@app.callback()
def bapipe(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit."),
    ] = False,
) -> None:
    """Decide, prove and run the best way to train a network as a pipeline over several devices."""


class _PrintableFormatter(logging.Formatter):
    """Makes names printable and arguments that a record names flags; the lines of a traceback stay lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        return with_flags(printable(super().formatMessage(record), MAX_LINE))


def main() -> None:
    """Runs the command line; a BapipeError or OSError ends it with one line and exit code 1, or 3 if nothing fits.

    A signal ends it with one line and exit code 130, 143 or 129.
    """
    raise_on_signals()
    open_closed_streams()
    forget_wrong_sizes()
    gc.set_threshold(50_000)  # a file of many layers is many objects, none of them garbage
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has no box characters is no reason to fail
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if is_first_rank():  # in a torchrun job every rank opens the data; one of them logs it
        logging.getLogger("bapipe.zoo").setLevel(logging.INFO)
    try:
        app(prog_name="bapipe")
    except BapipeError as error:
        if not (isinstance(error, RunFailed) and error.told):
            _show_error(" ".join(with_flags(str(error)).splitlines()))
        sys.exit(3 if isinstance(error, Infeasible) else 1)
    except (OSError, MemoryError, ImportError) as error:  # of the system, rather than of a fault of this program
        if isinstance(error, ImportError) and not is_without_memory(error):
            raise
        _show_error(system_error_text(error))
        sys.exit(1)
    except RuntimeError as error:
        if not is_without_threads(error):
            raise
        _show_error(first_line(error))
        sys.exit(1)
    except Stopped as stop:
        if is_first_rank():
            _show_note(with_flags(str(stop)))
        sys.exit(stop.code)


def _show_error(text: str) -> None:
    from bapipe.cli.printing import show_error  # loads rich, which takes longer than all of `bapipe --help`

    show_error(text)


def _show_note(text: str) -> None:
    from bapipe.cli.printing import note

    note(text)
