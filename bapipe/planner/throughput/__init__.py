"""Plans for the least work on the most loaded device, once the pipeline is full."""
