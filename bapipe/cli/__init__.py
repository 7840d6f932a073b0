"""The command line: one handler a command; the only place that prints and picks exit codes."""

import logging
import os
import sys

import typer

from bapipe.cli import plan, profile, run
from bapipe.cli.progress import err
from bapipe.errors import BapipeError, Infeasible, RunFailed

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # formatting help with rich would double its time
    help="Decides, proves and runs the best way to train a network as a pipeline over several devices.",
)
app.command("profile")(profile.profile)
app.command("import")(profile.import_)
app.command("cluster")(profile.cluster)
app.command("plan")(plan.plan)
app.command("compare")(plan.compare)
app.command("simulate")(plan.simulate)
app.command("show")(plan.show)
app.command("run")(run.run)
app.command("export")(run.export)


def main() -> None:
    """Runs the command line; a BapipeError ends it with one line and exit code 1, or 3 where nothing fits."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if os.environ.get("RANK", "0") == "0":  # of a torchrun job every rank opens the data
        logging.getLogger("bapipe.zoo").setLevel(logging.INFO)
    try:
        app()
    except BapipeError as error:
        text = " ".join(str(error).splitlines())
        if not (isinstance(error, RunFailed) and error.told):
            err.print(f"error: {text}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(3 if isinstance(error, Infeasible) else 1)
