"""Runs the command line: `python -m bapipe`."""

from bapipe.cli import main

main()
