"""What to change where a module is one layer and shall be cut, by the kind of reason."""

from bapipe.equivalence.cause import KEEPS_ATTRIBUTES

_HINTS = (
    (
        ("uses values of tensors", "depends on the values of tensors"),
        "choose by `torch.where` or a mask in place of reading values, or put the lines that read them into a module "
        "of their own",
    ),
    (
        ("fails on tensors without values", "cannot be recorded", "comes from where calls of torch"),
        "make constants by `torch.tensor`, or in `__init__` with `register_buffer`, and let the code take any number "
        "of samples; or put the line that fails into a module of its own",
    ),
    (
        ("random numbers in Python",),
        "draw by torch, such as `torch.rand`, or put the draw into a module of its own",
    ),
    (
        ("its forward seeds ",),
        "leave out the seeding, as a run has a seed, or put what draws into a module of its own",
    ),
    (
        ("from a generator that no module has",),
        "make the generator in `__init__`, as an attribute of the module that draws from it",
    ),
    (
        ("has a hook of ",),
        "register the hook on modules inside, or do in the forward what it does",
    ),
    (
        ("depending on the batch size", " at batches of "),
        "let torch compute from the samples, as by `mean`, what the code computes from their number",
    ),
    (
        ("calls depends on the batch size",),
        "call the same functions for any number of samples, or put that code into a module of its own",
    ),
    (
        ("torch.func.vmap",),
        "write the function for the whole batch, or put its call into a module of its own",
    ),
    (
        ("its forward assigns the buffer",),
        "write to the buffer in place, as by `copy_`, in the forward of the innermost module that has it",
    ),
    (
        ("is changed outside of the layer", "its forward changes '"),
        "write to it in the forward of the innermost module that has it",
    ),
    (
        ("between calls", "from call to call"),
        "return the values, or keep them in a module of their own",
    ),
    (
        ("uses torch.utils.checkpoint",),
        "leave out the checkpointing, as a plan says what is recomputed",
    ),
    (
        ("takes derivatives of outputs",),
        "take derivatives of a smaller part",
    ),
    (
        ("changes tensors in place",),
        "write to a copy, or in the module that makes the tensor",
    ),
)  # fmt: skip
"""(texts of reasons, what to change), of which the first counts that has one."""

_OF_OTHERS = "put the lines of this into a module of their own, which is then the only one"


def with_hint(reason: str) -> str:
    """Returns why a module is one layer, and what to change so that it can be cut."""
    if "write to it in place" in reason or KEEPS_ATTRIBUTES in reason:  # it says so itself
        return reason
    hint = next((hint for texts, hint in _HINTS if any(text in reason for text in texts)), _OF_OTHERS)
    return f"{reason}; to cut it, {hint}"
