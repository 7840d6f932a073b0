"""The likely cause why a module cannot be split, from what its code names."""

from torch import nn

from bapipe.module_state.assigned_attributes import assigns_attributes, forward_functions, names_in_forward
from bapipe.module_state.names_in_code import numbers_compared_in
from bapipe.module_state.whose_code import calls_other_code
from bapipe.torch_private.modules import hooks_in_words
from bapipe.tracing.reasons import CHOOSE_WITHOUT_VALUES, REGISTER_INSIDE, RETURN_VALUES, Reason

_CAUSES = (
    (("apply",), Reason("may use a torch.autograd.Function, whose backward tracing may lose")),
    (
        ("checkpoint",),
        Reason("uses torch.utils.checkpoint", "leave out the checkpointing, as a plan says what is recomputed"),
    ),
    (
        ("functional_call",),
        Reason(
            "calls modules with other weights than their own (torch.func.functional_call), which tracing does not see",
            "compute with such weights by functions, such as torch.nn.functional.linear",
        ),
    ),
    (("register_hook",), Reason("adds hooks to tensors")),
    (
        ("grad", "jacrev", "jacfwd", "vjp", "jvp", "jacobian", "hessian"),
        Reason(
            "takes derivatives of outputs with respect to inputs, which cannot be taken across a cut",
            "take derivatives of a smaller part",
        ),
    ),
    (
        ("requires_grad_",),
        Reason("changes which parameters have gradients (requires_grad_); use detach() on tensors instead"),
    ),
    (
        ("data", "copy_", "clamp_", "mul_", "add_", "fill_", "lerp_"),
        Reason("changes tensors in place", "write to a copy, or in the module that makes the tensor"),
    ),
    (("random", "rand", "randn", "randint", "randperm", "bernoulli"), Reason("draws random numbers")),
    (
        ("item", "tolist", "any", "all", "nonzero", "unique"),
        Reason("depends on the values of tensors", CHOOSE_WITHOUT_VALUES),
    ),
    (("autocast",), Reason("changes autocast")),
)
"""(names in the code of a forward, what they are likely to mean)"""

_SINGLE_SAMPLE = Reason(
    "does something else for a single sample than for several, which it was traced with: let it do the same for any "
    "number, or choose micro-batches of two samples and more",
    to_cut="",
)

_SIZES = frozenset({"shape", "size", "len", "__len__", "numel"})
"""Names by which code asks how many samples there are."""

_KEEPS_ATTRIBUTES = Reason(
    "keeps values in attributes between calls; let it return them, and pass them to the code that uses them", to_cut=""
)

_LOSS_ALONE = Reason(
    "a loss can read only what the model returns: let the model return all that the loss needs", to_cut=""
)

_OF_LOSS_DERIVATIVES = Reason(
    "the loss takes derivatives of outputs with respect to inputs, which cannot be taken across stages: compute them "
    "in the model's forward, by `torch.autograd.grad` with `create_graph=True`, and return them",
    to_cut="",
)

_OF_DERIVATIVES = Reason(
    "code around it takes derivatives of outputs with respect to inputs, which cannot be taken across a cut",
    "take derivatives of a smaller part",
)

_DERIVATIVE_FAILED = "appears to not have been used in the graph"
"""In what torch.autograd.grad raises where what it differentiates was not computed from what it differentiates by."""


def cause_in_loss(what: str) -> Reason:
    """Returns why stages cannot compute a loss, of what differs, or the error that it raised, in words."""
    return _OF_LOSS_DERIVATIVES if _DERIVATIVE_FAILED in what else _LOSS_ALONE


def own_code(root: nn.Module, path: str) -> str:
    """Returns the innermost module around a path that runs code from outside torch; empty for the root.

    Modules of torch do what they say, so what is not kept is in the code that calls them.
    """
    modules = dict(root.named_modules())
    while path and (path not in modules or not calls_other_code(modules[path])):
        path = path.rpartition(".")[0]
    return path


def likely_cause(
    root: nn.Module, path: str, what: str, keeps_state: bool = False, *, single_samples: bool = False
) -> Reason:
    """Returns what is likely to be the cause, if it is in the code of the module at `path`.

    Args:
        what: what differs, or the error that was raised, in words.
        keeps_state: whether only later micro-batches differ.
        single_samples: whether all micro-batches have a single sample.
    """
    if _DERIVATIVE_FAILED in what:
        return _OF_DERIVATIVES
    module = root.get_submodule(path)
    owner = f"'{path}'" if path else "the model"
    if (hook := hooks_in_words(module)) is not None:
        return Reason(f"likely because {owner} has {hook}", REGISTER_INSIDE)
    if keeps_state:
        text = f"the forward of {owner} keeps values between calls, which tracing does not see"
        return Reason(text, RETURN_VALUES)
    names = names_in_forward(module)
    if single_samples and not names.isdisjoint(_SIZES) and _compares_with_one(module):
        return _SINGLE_SAMPLE.behind(f"likely because the forward of {owner} ")
    for hints, cause in _CAUSES:
        if not names.isdisjoint(hints):
            return cause.behind(f"likely because the forward of {owner} ")
    if assigns_attributes(module):
        return _KEEPS_ATTRIBUTES.behind(f"likely because the forward of {owner} ")
    return Reason("the cause is not known")


def _compares_with_one(module: nn.Module) -> bool:
    """Returns whether the forward of a module asks whether something is one, or less than two."""
    compared = (numbers_compared_in(one, ("==", "!=", "<", ">")) for one in forward_functions(module))
    return any(number in (1, 2) for numbers in compared for number in numbers)
