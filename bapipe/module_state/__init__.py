"""What the code of a module keeps between calls, beside parameters and buffers, and how to put it back.

Begin with `python_state`: `state_restored` undoes what forwards change in a module and in what it reaches.

- `backward_state`: what a forward leaves in modules, for the backward of its micro-batch.
- `code_state`: what hooks and forwards keep outside of a module, in closures, defaults and globals.
- `copies`: deep copies of objects that hold what cannot be copied. `iterators`: copies of iterators, which code may
  advance meanwhile.
- `cached_functions`: forwards that call what `functools.lru_cache` caches without the caches.
- `reached_state`: the objects that code reaches and may change, and numbers that it keeps. `left_outside`: tensors
  that forwards leave elsewhere, such as in a global list.
- `python_random`: the random generators of Python and numpy. `modes`: training and evaluation mode.
- `assigned_attributes`, `names_in_code`: what code assigns and names, read from the code itself. `named_values`: plain
  values that it may read. `variables`: those around a function, its globals and defaults.
- `unregistered`: parameters in lists and dictionaries, which torch does not see. `whose_code`: torch's, that of other
  libraries, or the user's.
"""
