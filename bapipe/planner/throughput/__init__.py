"""Plans for throughput: minimize the work of the most loaded device once the pipeline is full.

In a long run the fill and drain of the pipeline do not count; the throughput depends on the work of the busiest device
per step, its *load*: compute, transfers, update and all-reduce. Minimizing the largest load over devices needs no
schedule, so the search is exact over all cuts of the layer graph, not only over cuts of one linear order of the layers.

Begin with `search.explore_throughput`. The algorithm:

1. Merge layers that share parameters (`contracted_graph`); enumerate the downsets of the layer graph. Each is a
   *boundary*: the layers before a cut. With more than `MAX_DOWNSETS`, use the prefixes of three linear orders.
2. Sum the costs of the layers before each boundary (`loads.StageCostSums`): the cost of any stage is then a difference
   of two sums, computed for a whole block of stages in one numpy call.
   One stage on one device or on replicas is the first plan, at each micro-batch size (`naive_plans`).
3. For each micro-batch size, minimize the largest load (`load_search`) over paths from the empty to the full boundary:
   - devices all the same: for a limit on the load, a dynamic programme over boundaries finds the fewest devices that
     stay below it; bisection on the limit (`min_devices_dp`, with `homogeneous`);
   - devices that differ: Bellman's equation over (boundary, devices of a stage and of its two neighbours)
     (`min_max_dp`, with `heterogeneous`), for one order of the devices after another (`orders`, `order_search`).
   Both start with limits just above a lower bound and prove the optimum.
4. If not all downsets were searched, raise the bound and improve the plan (`large_graph`): along all downsets if they
   can be listed (`downset_bound`, `downset_covers`), else by minimum cuts (`window_bound`, `cut_windows`). Then repeat
   step 3 on the downsets next to the best cuts until that no longer helps (`neighbourhood`).
5. Build 1F1B with one micro-batch in flight per device of the stage and later ones, and simulate it (`load_solution`).

`problem` defines the two problems and their results. docs/throughput.md has the statements and proofs.
"""
