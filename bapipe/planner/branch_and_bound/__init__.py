"""Plans for the least time of a step: every cut, device, micro-batch size and schedule, best first."""
