"""Mutated files of every kind that bapipe reads: each is read, or refused with an error, within limits."""
