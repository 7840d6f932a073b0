"""Runs the command line: `bapipe`, and `python -m bapipe`."""

from bapipe.stop_signals import end_at_once_on_signals, raise_on_signals


def main() -> None:
    """Runs the command line; signals end it with one line also while its modules are imported."""
    raise_on_signals()
    from bapipe.cli import main as run_command_line

    try:
        run_command_line()
    except SystemExit as ended:
        if isinstance(ended.code, int):
            end_at_once_on_signals(ended.code)
        raise


if __name__ == "__main__":
    main()
