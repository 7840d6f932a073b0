"""Control flow of torch, such as `torch.cond`, which fails where operators are watched or random numbers are seeded."""

import re

from bapipe.tracing.code_position import failed_line


def control_flow_in_words(error: BaseException) -> str | None:
    """Returns why a model fails, and what to do, if that is an operator that takes functions; else None.

    torch runs it in a mode, as comparing and measuring need one, only where all that it is given can be compiled in
    that mode.
    """
    found = re.search(r"no rule registered for HigherOrderOperator (\w+)", str(error))
    if not found and not type(error).__module__.startswith("torch._dynamo"):
        return None
    name = f"`torch.{found[1]}`" if found else "control flow of torch, such as `torch.cond`"
    return (
        f"the model calls {name}{failed_line(error) or ''}, which torch cannot run where random numbers are seeded and "
        "operators are watched: choose by `torch.where`, or by Python's `if`, `for` or `while` in a module of its own"
    )
