"""The order of actions for fixed stages: which F, I and W each device runs next, to make the step as short as possible.

Named schedules (1F1B, ZB-H1, ...) are good orders for equal stages; for unequal ones a searched order is often shorter.
Begin with `search.search_order`, or with `improve_plan.improve_plan`, which also moves layers between stages. The
algorithm:

1. `problem`: stages, transfers and memory as plain integers. An order is a sequence of (stage, phase) per device; by
   the renaming lemma micro-batches may always run in ascending order.
2. `bounds`: heads and tails of all actions, then the preemptive one-machine bound for every device and link
   (Carlier 1982). It holds for every legal schedule of these stages.
3. `list_scheduler`: builds an order for each of a family of priority rules, from few to many micro-batches in flight.
4. `local_search`: threshold accepting (Dueck and Scheuer 1990), moving one action at a time. `evaluate` times an order
   in one pass if idling never pays (a *monotone* problem), else the simulator does.
5. `cp_sat`: a job-shop model in CP-SAT, if OR-tools is installed; it also raises the lower bound.
6. `fuse_backward`: adjacent I and W become one B if that costs no time.

Every step ends the search if the best order attains the lower bound. Work is counted in actions evaluated and in the
solver's deterministic time, so the result does not depend on the machine. docs/action_orders.md has the
statements and proofs.
"""
