"""Long chains: a lower bound by bisection over a relaxation, and good plans by construction and hill climbing.

If a chain can be cut at hundreds of places, there are too many partial plans to expand them one by one.

    bisection.py             the search: begin here
    balanced.py              constructs the first plans
    relaxation.py            decides whether any plan can be within a step time: a dynamic programme with range-minimum
                             queries
    feasible_intervals.py    which intervals of layers a stage may hold within a step time
    close_gap.py             searches exactly among these intervals

docs/algorithm.md has the proofs. The problems, layouts and results are those of `bapipe.planner.branch_and_bound`.
"""
