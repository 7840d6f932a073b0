"""What a search is given: profiles, a cluster, and options, checked and in the forms that searches take.

- `options`, `goal`: what a user fixes, allows and asks for. `profiles`: by kind of device. `clusters`: given or
  of this machine. `validation`: checks.
- `device_grouping`, `device_groups`, `sub_clusters`: other clusters of the same devices, merged, in groups, or fewer.
- `link_catalogue`: links that nobody has measured. `repeat_block`: the same model with more blocks.
- `scalable_times`: what of a layer's time a faster device takes less of.
"""
