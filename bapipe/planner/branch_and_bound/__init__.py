"""Plans for the minimum step time: best-first branch and bound over cuts, placements, schedules and micro-batch sizes.

The problem. A model is a chain of layers with measured times and bytes, a cluster has devices and links. A plan cuts
the chain into stages, gives each stage one or several devices (replicas), and names a schedule and a micro-batch size.
The simulator (`bapipe.simulator`) gives the step time of a plan; the search finds a plan with the minimum step time
that fits in memory, and proves it: its certificate is a lower bound on the step time of every plan of the space.

The search tree. For each schedule and micro-batch size there is a `Problem`. A node is a `PartialPlan`: the first
stages, each an interval of layers on a `StagePlacement`, and the placement of the next stage. A child fixes where that
stage ends and which placement follows. Nodes are expanded in the order of their lower bounds. A bound is the maximum
of eight admissible bounds, from what the placed stages cost and from a precomputed cost-to-go of all others.

Where to begin. docs/algorithm.md explains the whole with proofs. In the code, read in this order:

    space.py             options -> problems: one per schedule and micro-batch size, by problem_builder.py;
                         partition_space.py: the same in words
    roots.py             the roots of a problem: which devices, and orders of devices, are searched
    problem.py           one schedule at one micro-batch size; Layout (a solution) and its step time by the simulator
    search.py            best_first: the queue, dives, incumbents, the node budget
    partial_plan.py      PartialPlan, a node of the tree
    lower_bound.py       the eight bounds, stated; the children of a node and their bounds
    next_stage.py        the bounds of the placed stages and the next one
    cost_to_go.py        the backward dynamic programme over placements and boundaries; sync classes
    stage_bound.py       the bounds of one stage in isolation
    local_search.py      the neighbourhoods that improve incumbents
    infeasible.py        when nothing fits: the least infeasible plan, and advice

What stages cost, which of them fit and where they may run is in `bapipe.planner.stages`.
Chains with hundreds of cuts are searched by `bapipe.planner.long_chain` instead.
"""
