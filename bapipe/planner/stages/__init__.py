"""What stages cost, and on which devices they may run: shared by all searches, which import this package.

Layers
    intervals               all intervals of layers between legal cuts, as flat arrays
    interval_times          the times of all intervals on one kind of device; interval_buckets: all-reduce buckets
    interval_memory         the bytes of all intervals on one kind of device
    chain                   the cost of one interval, as the simulator needs it

Devices
    devices                 classes of interchangeable devices, and the symmetry of hosts
    placements              which devices may run a stage, and which the next one
    device_orders           the orders in which many devices are taken
    fast_links              paths through the devices along the fastest links, for naive pipelines
    equal_replicas          equal numbers of devices per stage, for naive pipelines
    constraints             the layers and devices that the user keeps together or apart

Stages: an interval of layers on a placement
    stage_schedule          what the order of a schedule means for one stage and its replicas
    stage_candidates        the times of a placement with each interval
    stage_memory            which intervals fit on a placement, and which layers they recompute
    recomputation           the choice of the recomputed layers; layer_knapsack, and shared_devices if devices have
                            several stages
    cut_transfers           the transfers between two placements

Helpers
    longest_path            the longest path through the actions and transfers of a step; longest_path_of_many: compiled
    nearest_cuts            rounds wanted cuts to boundaries
"""
