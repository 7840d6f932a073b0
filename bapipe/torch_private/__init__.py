"""Every private name of torch that bapipe uses, behind names of its own.

torch promises nothing about names with a leading underscore (and nothing about the pipelining runtime's insides), so
when a new release breaks bapipe, this is the package to look at. A test holds that no other file uses such names.
Works with torch 2.11 to 2.13; what it takes before 2.13 is in `older`.

`torch.distributed.pipelining` is imported inside the functions that need it: that takes as long as torch itself, and
tracing, which only needs nested structures, should not wait for it.
"""
