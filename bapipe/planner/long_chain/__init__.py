"""Long chains: a lower bound by bisection over a relaxation, and good plans by construction and hill climbing.

If a chain can be cut at hundreds of places, partial plans are too many to expand one by one. Begin with
`bisection.py`, which is the search; `balanced.py` constructs its first plans; `relaxation.py` decides by a dynamic
programme with range-minimum queries whether any plan can be within a step time; `feasible_intervals.py` says which
intervals of layers a stage may hold then; `close_gap.py` searches exactly among those. docs/algorithm.md has the
proofs. The problems, layouts and results are those of `bapipe.planner.branch_and_bound`.
"""
