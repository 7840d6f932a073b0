"""Orders of a plan's actions that no named schedule has."""
