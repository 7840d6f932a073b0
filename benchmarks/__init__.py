"""Measurements of bapipe against other planners, other runtimes and its own predictions; README.md has the figures."""
