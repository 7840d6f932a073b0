"""Plans for many devices, whose stages take consecutive devices: described by few numbers, and simulated.

The other searches keep tables of intervals and placements, which grow with the square of the layers and the devices.

Plans
    line                    the devices in one order, and the step time and memory of its plans; layer_sums,
                            line_memory, stages/device_orders
    naive, growing_stages   plans to begin with; first_plans ranks them
    fitting_replicas, fitting_cuts    the same for tight memory; fitting_programme
    estimate                the step of a plan without a table of its actions; step_programme, stage_programme,
                            search_arrays
    climb                   local search, as long as it makes plans faster; moves, neighbourhood, walk
    recomputed_layers       the layers to recompute if a stage does not fit; recompute_programme, and for the best
                            plan fewer_recomputed
    timed_plans             all plans that have been simulated
    best_naive              the fallback when no time is left

Bounds: no plan is within a step time, the goal, if a relaxation of all plans has none
    prefix_bound            relaxes all but the first devices and layers; prefix_programme, furthest_prefixes,
                            in_flight, stage_limits, stage_arrays, stage_kinds, savings, replica_classes,
                            replica_weights, early_waits
    single_devices          the same for stages on one device each
    ring_bound              adds the all-reduces that follow the way back of later stages; rings, stage_delays,
                            suffix_programme
    trip_bound              adds the trips of micro-batches through the stages before and after each; behind, tracked,
                            tracked_arrays, trip_tables, trip_windows, trip_limits, trip_sums, around_stages,
                            trips_before, trips_behind, trips_apart
    ring_ranges             which goals these are asked about, and for which plans; ring_goals, cut_ranges,
                            prefix_bisection, plan_kind, plan_range

search                      alternates between plans and bounds, until they meet or the time is over

A *trip* is the way of a micro-batch through stages forwards and back. A *class* is a range of numbers of devices that a
bound does not distinguish. A *look* uses only a part of a bound's tables, which takes less time.
docs/many_devices.md has the bounds and their proofs.
"""
