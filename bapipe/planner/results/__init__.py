"""What a search returns: decisions, a `Solution` with its bound, and the space that the bound is about.

- `decision`: what a plan decides, and its step by the simulator. `solution`: the best one, and the `Plan` made of it.
- `searched_space`: what was searched, as a record and in words. `work_bound`: what holds for every plan there is.
- `no_plan`: what an error in one part of a space means for all of it.
"""
