"""Predicts training runs that others published, and holds the predictions against what they measured."""
