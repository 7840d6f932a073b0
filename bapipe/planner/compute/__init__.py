"""The time and the processors of a search (deadlines, compiled code, threads, how fast plans are simulated); arrays."""
