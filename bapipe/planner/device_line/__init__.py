"""Plans whose stages take consecutive devices of the cluster: made from few numbers, and timed by the simulator alone.

The other searches keep tables of intervals and placements, which grow with the square of the layers and the devices.
`line.py` evaluates a plan without any, and `naive.py` makes the plans that everybody would try first; they are what is
left when the time is over before a search has found a plan. `climb.py` changes plans as `neighbourhood.py` says, for as
long as the estimates of `estimate.py` become shorter. `prefix_bound.py` bounds all plans of many devices,
`single_devices.py` those without replicas, and `search.py` looks for good ones near the bound.
"""
