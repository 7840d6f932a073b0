"""Plans for the minimum step time: best-first branch and bound over cuts, placements, schedules and micro-batch sizes.

The problem. A model is a chain of layers with measured times and bytes, a cluster has devices and links. A plan cuts
the chain into stages, gives each stage one device or several (replicas), and chooses a schedule and a micro-batch size.
The simulator (`bapipe.simulator`) computes the step time of a plan. The search finds a plan with the minimum step time
among those that fit in memory, and proves it by a lower bound on the step time of every plan in the search space.

The search tree. For each schedule and micro-batch size there is a `Problem`. A node is a `PartialPlan`: the first
stages, each an interval of layers on a `StagePlacement`, and the placement of the next stage. A child fixes where that
stage ends and the placement after it. Nodes are expanded in the order of their lower bounds. A bound is the maximum of
eight admissible bounds, computed from the costs of the placed stages and a table of the cost-to-go of all later stages.

Where to begin. docs/algorithm.md explains all of it with proofs. In the code, read in this order:

    space.py             makes the problems of a search, one per schedule and micro-batch size; problem_builder.py
    partition_space.py   describes the search space for the certificate
    roots.py             the roots of a problem: the choices and orders of devices that are searched
    problem.py           one schedule at one micro-batch size; Layout (a solution) and its simulated step time
    search.py            best_first: the queue, dives, incumbents, the node budget
    partial_plan.py      PartialPlan, a node of the tree
    lower_bound.py       states the eight bounds; the children of a node and their bounds
    next_stage.py        the bounds of the placed stages and the next one
    cost_to_go.py        a backward dynamic programme over placements and boundaries; finish classes
    stage_bound.py       the bounds of one stage by itself
    local_search.py      the neighbourhoods that improve incumbents
    infeasible.py        if nothing fits: the plan that lacks the least memory, and advice

The costs and the memory of stages, and the devices that may run them, are in `bapipe.planner.stages`.
Chains with hundreds of cuts are searched by `bapipe.planner.long_chain` instead.
"""
