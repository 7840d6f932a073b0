"""Measurements of bapipe against other planners, other runtimes and its own predictions; README.md has the figures."""

import argparse


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Returns a parser of a benchmark's arguments, whose help begins with the benchmark's docstring."""
    return argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
