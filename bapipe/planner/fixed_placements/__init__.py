"""Searches the cuts of pipelines whose placements are fixed: lower bounds from paths, local search, branch and bound.

Where devices have several stages, the schedule's table says which device runs each stage, so the choice of devices
fixes the placements; where each device has one stage and all are alike, their number does. Begin with `search.py`,
which gives every such pipeline its turns; `pipeline.py` has the times of all cuts as vectors (`stage_times.py`: those
of a stage), and paths as weights of such vectors; `path_bound.py` is the lower bound, by a matrix game
(`matrix_game.py`) of cuts against paths (`planner/stages/longest_path.py`); `naive_cuts.py` makes the first cuts,
`local_search.py` and then `random_moves.py` improve them. If problems of any kind have few pipelines, `cut_search.py`
divides their cuts (`possible_cuts.py`) until the best are proven. docs/algorithm.md has the proofs. The problems,
layouts and results are those of `bapipe.planner.branch_and_bound`.
"""
