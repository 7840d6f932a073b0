"""Plans for many devices, whose stages take consecutive ones: made from few numbers, and timed by the simulator.

The other searches keep tables of intervals and placements, which grow with the square of the layers and the devices.

Plans
    line                    the devices in an order, and the step time and memory of its plans; layer_sums,
                            stage_memory, stages/device_orders
    naive, growing_stages   plans to begin with; first_plans ranks them
    fitting_groups, fitting_cuts    the same for tight memory; fitting_programme
    estimate                the step of a plan without a table of its actions; step_programme, stage_programme,
                            search_arrays
    climb                   changes plans for as long as that makes them faster; moves, neighbourhood, walk
    recomputed_layers       which layers are recomputed where a stage does not fit; recompute_programme, and of the
                            best plan fewer_recomputed
    timed_plans             all that have been timed
    best_naive              what is left when no time is

Bounds: no plan is within a step time, the goal, if a relaxation of all plans has none
    prefix_bound            relaxes all but the first devices and layers; prefix_programme, furthest_prefixes,
                            in_flight, stage_limits, stage_arrays, stage_kinds, savings, replica_classes,
                            replica_weights, early_waits
    single_devices          the same of stages on one device each
    ring_bound              adds the sums of gradients, behind the way back of later stages; rings, stage_delays,
                            suffix_programme
    trip_bound              adds the trips of micro-batches through all stages, before and behind each; behind, tracked,
                            tracked_arrays, trip_tables, trip_windows, trip_limits, trip_sums, around_stages,
                            trips_before, trips_behind, trips_apart
    ring_ranges             which goals these are asked about, and of which plans; ring_goals, cut_ranges,
                            prefix_bisection, plan_kind, plan_range

search                      both by turns, until they meet or the time is over

A *trip* is the way of a micro-batch through stages forwards and back. A *class* is a range of numbers of devices that a
bound does not tell apart. A *look* asks a bound with a part of what it knows, which takes less time.
docs/many_devices.md has the bounds and their proofs.
"""
