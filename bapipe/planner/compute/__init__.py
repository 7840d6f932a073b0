"""The time and the processors of a search: deadlines, compiled code, threads, and how fast plans are simulated."""
