"""The simulator: what a pipeline's step costs in time and memory. All searches and reports take their figures from it.

Begin with `simulate.simulate`; `simulate.simulate_schedule` states the rules. A simulation goes through these files:

    stage           a stage: its cost on each of its devices, and the bytes that it sends
    stage_cost      layers of a profile -> the stage; `tied_weights`: layers that share parameters; `lanes`: forwards
                    and backwards side by side
    cuts            what crosses the cuts between stages, and which cuts are valid
    compiled        schedule -> lanes, messages and channels, as columns of integers
    longest_path    the times of all actions, if no transfer has to queue and every device computes while it transfers
    fifo_links      the same, if transfers queue on links
    event_driven    the same on any device
    memory          the bytes of every device, from the order of its actions
    allreduce       the sums of gradients over the replicas of a stage
    interval_costs  the same costs, transfers and rings for many intervals of layers at once, in numpy: for searches
    timeline        the result: actions, transfers, all-reduces and updates over time, and what a plan predicts
"""
