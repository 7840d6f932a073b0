"""Tests of the analyses of a plan."""
