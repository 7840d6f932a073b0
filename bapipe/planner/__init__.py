"""Decides how to train a model as a pipeline: from profiles, a cluster and options to a plan with a certificate.

Begin with `plan.py`. The path of a plan:

1. `inputs/`: `PlanOptions` is passed on from the command line to all searches, some of which get a copy with other
   limits; `validation.py` checks inputs; `device_grouping.py`: cores as single devices, or merged into devices of
   several threads.
2. `linearizations.py`: the orders of the layers along which a branching model is cut.
3. `plan_step.py` searches the shortest step along one order of the layers, as a `SearchRequest` says. `exact_search.py`
   uses `branch_and_bound/`, or `fixed_placements/` if devices have several stages, or `long_chain/` for models of many
   layers; `line_solution.py` uses `device_line/` for many devices. `action_order/` then searches a better order of
   actions. `throughput/` minimizes the largest load.
4. `results/`: every search returns a `Solution`; `solution.make_plan` builds the `Plan` of the best, and
   `searched_space.py` describes the searched space in its certificate. `baselines.py` adds what
   plans are compared with.

The calls on the way there, each within the one above it:

    plan.plan                                   for a goal by goal_search.reach_goal, many times
      _solve_groupings                          best_grouping.best_grouping: for each grouping of the devices
        _solve                                  by the objective: throughput.search.solve_throughput, or
          _over_linearizations                  linearizations.solve_over_linearizations: along each order of the layers
            plan_step.solve_step_time           the named schedules; then action_order.improve_plan, for `search`
              solve_partition                   with the bound of any plan, and no slower than naive plans
                _by_size_of_problem             for many devices line_solution.solve_on_line; else, or besides,
                  _solve_exactly                exact_search.find_best_layout: makes the space and its tables
                    layout_search.search_layouts    by the kind of each problem: fixed_placements, long_chain, or
                      best_first                branch_and_bound.search
            plan_step.add_baselines             for comparison
          least_memory.with_least_memory        of equally fast schedules
      results.solution.make_plan

Folders, each of which knows those before it only: `inputs/` and `compute/` (time and processors), `results/`, `stages/`
(what stages cost and where they may run), `branch_and_bound/`, the other searches, the files of this folder, and then
`analysis/`, which explains plans, evaluates hand-made ones, compares strategies and finds the Pareto front.
"""
