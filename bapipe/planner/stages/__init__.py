"""What stages cost, and where they may run: what the searches share, none of which this package knows.

- `intervals`: all intervals of layers between legal cuts as flat arrays, with prefix sums. `interval_times`, with
  `interval_buckets`: their times. `interval_memory`: their bytes. `chain`: one interval, as the simulator wants it.
- `devices`: classes of devices (symmetry). `placements`: which devices may run a stage. `device_orders`: the orders in
  which many devices are taken. `equal_groups`: what naive pipelines are made of. `constraints`: what a user rules out.
- `stage_candidates`: the times of a stage on a placement, for all intervals. `stage_memory`: which of them fit, and
  what they recompute, by `recomputation` and `layer_knapsack`; `shared_devices` where devices have several stages.
- `cut_transfers`: what passes between two stages. `stage_schedule`: what an order of actions demands of one stage.
- `longest_path`, `nearest_cuts`: helpers.
"""
