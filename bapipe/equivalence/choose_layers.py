"""Chooses the layers of a module such that stages of them, cut anywhere, give the original's results."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from bapipe.equivalence.check import Difference, Equivalence, Unchecked, compare_split, warn_of_iterators
from bapipe.equivalence.communication import ForwardCommunicates, forwards_checked
from bapipe.equivalence.handed_on import modules_to_join
from bapipe.equivalence.inlining import inlinable, inlined_in_vain
from bapipe.equivalence.outcome import Loss, Microbatch
from bapipe.errors import InvalidModel
from bapipe.formats.profile import LOSS
from bapipe.module_state.python_state import state_restored
from bapipe.module_state.whose_code import is_of_torch
from bapipe.printable import are_one_layer
from bapipe.tracing.layers import trace
from bapipe.tracing.leaf_modules import matching_paths
from bapipe.tracing.model import TracedModel
from bapipe.tracing.reasons import Reason

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Which modules are traced otherwise than by default, by their paths.

    Attributes:
        reasons: those that became one layer, and why.
        inlined: those without children whose operators are layers.
        called: those that are not to be inlined.
    """

    reasons: Mapping[str, Reason] = field(default_factory=dict)
    inlined: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()

    def without(self, inlined: frozenset[str]) -> "_Choice":
        """Returns the choice with some modules called again, for good."""
        return replace(self, inlined=self.inlined - inlined, called=self.called | inlined)


def trace_checked(
    module: nn.Module,
    inputs: Sequence[Tensor],
    loss: Loss,
    microbatches: Sequence[Microbatch],
    *,
    leaf_modules: Sequence[str] = (),
    operator_layers: bool = False,
    max_size: int | None = None,
) -> tuple[TracedModel, Equivalence | Unchecked]:
    """Returns the layers of a module, of which each cut is known to give the original's results.

    Where the split model differs, modules without children that assign attributes are inlined first, if that gives the
    original's results: their calls, which are layers, may find values there that other calls left. Else the module in
    which it differs becomes one layer, so that stages call it as it is; then the next larger one, until there is no
    difference. So does the module around layers that give each other values that are no tensors. `max_size` is the size
    of the largest micro-batches.

    Raises:
        InvalidModel: as `trace`; the model differs even so; or its forward communicates with other processes.
    """
    warn_of_iterators(module)
    choice = _Choice(called=frozenset(matching_paths(module, leaf_modules)))
    while True:
        try:
            with state_restored(module, parameters=True):
                model = trace(
                    module,
                    inputs,
                    leaf_modules=(*leaf_modules, *choice.reasons),
                    operator_layers=operator_layers,
                    called_leaves=bool(choice.reasons),
                    microbatch_size=max_size,
                    inlined=sorted(choice.inlined),
                )
            with forwards_checked(module):
                result = compare_split(model, loss, microbatches)
        except ForwardCommunicates:
            raise
        except InvalidModel:
            if not choice.inlined:
                raise
            choice = choice.without(choice.inlined)
            continue
        if joined := _to_join(model, result, microbatches[0], choice):
            choice = replace(choice, reasons={**choice.reasons, **joined})
            continue
        if isinstance(result, Equivalence) or (isinstance(result, Unchecked) and not choice.inlined):
            changed = result.changed if isinstance(result, Equivalence) else None
            reasons = {**model.leaf_reasons, **choice.reasons}
            return replace(model, leaf_reasons=reasons, inlined=choice.inlined, changed=changed), result
        choice = _next_choice(module, model, result, choice)


def _to_join(
    model: TracedModel, result: Equivalence | Unchecked | Difference, microbatch: Microbatch, choice: _Choice
) -> dict[str, Reason]:
    """Returns further modules that must be one layer for what their layers hand on, if some could not be cut apart."""
    if not isinstance(result, Equivalence) or result.num_stages == len(model.layers):
        return {}
    joined = modules_to_join(replace(model, changed=result.changed), microbatch)
    joined = {path: reason for path, reason in joined.items() if path not in choice.reasons}
    for path, reason in joined.items():
        _log.warning("'%s' is one layer: %s", path, reason.with_advice)
    return joined


def _next_choice(module: nn.Module, model: TracedModel, result: Unchecked | Difference, choice: _Choice) -> _Choice:
    """Returns what to try after a choice with which the split model differs, or could not be compared.

    Raises:
        InvalidModel: nothing is left to try.
    """
    if isinstance(result, Unchecked):
        return choice.without(choice.inlined)
    in_vain = inlined_in_vain(module, result.code, choice.inlined)
    if in_vain:
        return choice.without(in_vain)
    more = frozenset() if result.path == LOSS else inlinable(model, result.code, choice.called | choice.inlined)
    if more:
        return replace(choice, inlined=choice.inlined | more)
    larger = _next_leaves(model, result.code)
    if not larger:
        raise InvalidModel(f"the split model would not train as the original does: {result}{_advice(result)}")
    reason = Reason(f"split, it would differ from the original: {result}", result.cause.to_cut)
    kind = type(module.get_submodule(larger[0])).__name__
    _log.warning("%s: %s", are_one_layer(larger, kind), reason.with_advice)
    return replace(choice, reasons={**choice.reasons, **dict.fromkeys(larger, reason)})


def _advice(difference: Difference) -> str:
    if difference.path == LOSS or not difference.cause.to_cut:
        return ""
    return "; put this code into a module of its own, which is then one layer"


def _next_leaves(model: TracedModel, path: str) -> tuple[str, ...]:
    """Returns the innermost modules around a path that are not layers yet, with others of their class; or none."""
    layers = {layer.name.partition("#")[0] for layer in model.layers}
    modules = dict(model.root.named_modules())
    names = path.split(".") if path else []
    around = [".".join(names[:length]) for length in range(len(names), 0, -1)]
    outermost = next((place for place in range(len(around) - 1, -1, -1) if around[place] in layers), -1)
    for larger in around[outermost + 1 :]:
        kind = type(modules[larger])
        if issubclass(kind, nn.ModuleList | nn.ModuleDict):  # never called
            continue
        if is_of_torch(modules[larger]):
            return (larger,)
        return tuple(name for name, part in modules.items() if type(part) is kind and name)
    return ()
