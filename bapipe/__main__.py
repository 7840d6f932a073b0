"""Runs the command line: `bapipe`, and `python -m bapipe`."""

from bapipe.stop_signals import raise_on_signals


def main() -> None:
    """Runs the command line; signals end it with one line also while its modules are imported."""
    raise_on_signals()
    from bapipe.cli import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
