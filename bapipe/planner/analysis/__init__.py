"""Analyses of a plan: what limits its step time, and how much a change would help.

Begin with `explain.explain`, which describes the results of the others in sentences.

- `critical_path`: the chain of events that ends a simulated step, and the share of time of each device and link in it.
- `sensitivity`: the step time with 10 % more of one resource. Speeds and bandwidths are simulated with the same plan;
  memory is planned again, because the same plan would not use more.
- `time_balanced`: the plan with cuts that balance compute alone, to compare with.
- `gap`: what the lower bound leaves out. `near_ties`: plans hardly slower that need much less.
- `pareto`: the front of step time, peak memory and number of devices, by one search for each number of devices and
  each memory limit of a falling sequence.
- `strategies`: the fastest plan of each of ParaDL's strategies.
- `pinned`: a plan that a user made, simulated and certified against the bound over all plans.

docs/analysis.md has the details.
"""
