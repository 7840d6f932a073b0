"""Tells of code that it computes no mean over targets, by the functions and the names that it reaches."""

import dis
import sys
from collections.abc import Collection
from functools import cache
from types import CodeType, FunctionType, ModuleType

from torch import Tensor, nn

from bapipe.tracing.reached_state import CONSTANTS, KeptState, is_of_a_library

_CLASSES_OF_MEANS = (nn.CrossEntropyLoss, nn.NLLLoss)

_NAMES = frozenset(
    ("cross_entropy", "nll_loss", "linear_cross_entropy", "weighted_mean", "CrossEntropyLoss", "NLLLoss", "NLLLoss2d",
     "LinearCrossEntropyLoss")
)  # fmt: skip
"""Of the means, and of what calls them in torch."""

_HIDING_NAMES = frozenset(
    ("getattr", "__getattribute__", "__dict__", "vars", "globals", "locals", "eval", "exec", "__import__",
     "import_module", "attrgetter", "methodcaller")
)  # fmt: skip
"""By these code may call functions that it does not name."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def computes_no_means(code: KeptState) -> bool:
    """Returns whether code calls none of the functions that are means over targets, as far as it reaches them now.

    It is False where that cannot be told, as of code that imports, or makes objects of classes of its own. Not seen are
    methods of what the code is given.
    """
    if code.obstacle is not None or not code.names.isdisjoint(_NAMES | _HIDING_NAMES):
        return False
    reached = code.followed.values()
    classes = {type(one) for one in reached}  # only methods of their objects run, which are followed
    return not any(_may_compute_means(one, classes) for one in reached)


def _may_compute_means(one: object, known: Collection[type]) -> bool:
    match one:
        case FunctionType():
            if one.__name__ in _NAMES or _calls_unseen_code(one.__module__):
                return True
            # A library's function with a closure may be a wrapper around any other.
            return one.__closure__ is not None if is_of_a_library(one.__module__) else _imports(one.__code__)
        case nn.Module():
            return any(_is_mean_or_holds_code(part) for part in one.modules())
        case type():
            is_followed = one in known or is_of_a_library(one.__module__) or one.__module__ == "builtins"
            return issubclass(one, _CLASSES_OF_MEANS) or _calls_unseen_code(one.__module__) or not is_followed
        case ModuleType():
            return _calls_unseen_code(one.__name__)
    return False


def _is_mean_or_holds_code(module: nn.Module) -> bool:
    """Returns whether a module is a mean over targets, or has an attribute that may hold a function."""
    if isinstance(module, _CLASSES_OF_MEANS) or _calls_unseen_code(type(module).__module__):
        return True
    own = (value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    return not all(isinstance(value, (*CONSTANTS, Tensor)) for value in own)


def _calls_unseen_code(module: str | None) -> bool:
    """Returns whether functions of a Python module may compute means that its user's code does not name.

    Those of torch, numpy and Python do not, and those of the user's own modules are followed themselves.
    """
    top = (module or "").partition(".")[0]
    is_installed = "site-packages" in str(getattr(sys.modules.get(module or ""), "__file__", ""))
    return top == "bapipe" or (is_installed and top != "numpy" and not is_of_a_library(module))


@cache
def _imports(code: CodeType) -> bool:
    """Returns whether code imports, in a function inside it, too."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(one.opname == "IMPORT_NAME" for one in dis.get_instructions(code)) or any(map(_imports, inner))
