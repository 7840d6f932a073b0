"""The likely cause why a module cannot be split, from what its code names."""

from torch import nn

from bapipe.module_state.assigned_attributes import assigns_attributes, names_in_forward
from bapipe.module_state.torch_layers import calls_other_code
from bapipe.torch_private.modules import hooks_in_words

KEEPS_ATTRIBUTES = (
    "keeps values in attributes between calls; let it return them, and pass them to the code that uses them"
)

_CAUSES = (
    (("apply",), "may use a torch.autograd.Function, whose backward tracing may lose"),
    (("checkpoint",), "uses torch.utils.checkpoint"),
    (("register_hook",), "adds hooks to tensors"),
    (("requires_grad_",), "changes which parameters have gradients (requires_grad_); use detach() on tensors instead"),
    (("data", "copy_", "clamp_", "mul_", "add_", "fill_", "lerp_"), "changes tensors in place"),
    (("random", "rand", "randn", "randint", "randperm", "bernoulli"), "draws random numbers"),
    (("item", "tolist", "any", "all", "nonzero", "unique"), "depends on the values of tensors"),
    (("autocast",), "changes autocast"),
)  # fmt: skip


_LOSS_ALONE = "a loss can read only what the model returns: let the model return all that the loss needs"

_OF_LOSS_DERIVATIVES = (
    "the loss takes derivatives of outputs with respect to inputs, which cannot be taken across stages: compute them "
    "in the model's forward, by `torch.autograd.grad` with `create_graph=True`, and return them"
)

_OF_DERIVATIVES = (
    "code around it takes derivatives of outputs with respect to inputs, which cannot be taken across a cut"
)

_DERIVATIVE_FAILED = "appears to not have been used in the graph"
"""In what torch.autograd.grad raises where what it differentiates was not computed from what it differentiates by."""


def cause_in_loss(what: str) -> str:
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


def likely_cause(root: nn.Module, path: str, what: str, keeps_state: bool) -> str:
    """Returns what is likely to be the cause, in words, if it is in the code of the module at `path`.

    Args:
        what: what differs, or the error that was raised, in words.
        keeps_state: whether only later micro-batches differ.
    """
    if _DERIVATIVE_FAILED in what:
        return _OF_DERIVATIVES
    module = root.get_submodule(path)
    owner = f"'{path}'" if path else "the model"
    if (hook := hooks_in_words(module)) is not None:
        return f"likely because {owner} has {hook}"
    if keeps_state:
        return f"the forward of {owner} keeps values between calls, which tracing does not see"
    names = names_in_forward(module)
    for hints, cause in _CAUSES:
        if not names.isdisjoint(hints):
            return f"likely because the forward of {owner} {cause}"
    if assigns_attributes(module):
        return f"likely because the forward of {owner} {KEEPS_ATTRIBUTES}"
    return "the cause is not known"
