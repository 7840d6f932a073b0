"""Searches the cuts of pipelines whose placements are fixed: lower bounds from paths, local search, branch and bound.

If devices have several stages, the schedule's table says which device runs each stage, so the order of the devices
fixes all placements. If each device has one stage and all devices are alike, a sequence of numbers of replicas does.
Only the cuts remain to be chosen.

    search.py            the search if devices have several stages: begin here
    placed_pipeline.py   the times of all cuts as vectors, and paths through a step as weights of such vectors;
                         stage_times.py: the part of one stage
    path_bound.py        the lower bound, from a game of cuts against paths; matrix_game.py solves it, and
                         planner/stages/longest_path.py finds paths
    device_loads.py      a lower bound, and cuts, from what each device has to do; compiled: load_programme.py
    naive_cuts.py        the first cuts
    local_search.py      improves cuts by small moves; then random_moves.py
    cut_search.py        branch and bound over sets of cuts (possible_cuts.py), if problems of any kind have few
                         pipelines; cut_game.py is the game of one node
    improve.py           improves the result of any other search
    budget.py            the budget of all of these

docs/algorithm.md has the proofs. The problems, layouts and results are those of `bapipe.planner.branch_and_bound`.
"""
