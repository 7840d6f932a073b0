"""Values that layers hand on and that are no tensors: the modules that make and use one must be one layer together."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from bapipe.equivalence.outcome import Microbatch, device_of, trial
from bapipe.tracing.extract import extract
from bapipe.tracing.model import TracedModel
from bapipe.tracing.reasons import Reason, not_handed_on


def modules_to_join(model: TracedModel, microbatch: Microbatch) -> dict[str, Reason]:
    """Returns the innermost modules around the layers that hand each other what is no tensor, and why, by path.

    Where that is the whole model there is none: it has no smaller part to take as one layer.
    """
    found: dict[str, Reason] = {}
    for name, value in _values_handed_on(model, microbatch).items():
        maker = next(layer.name for layer in model.layers if name in layer.outputs)
        users = [layer.name for layer in model.layers if name in layer.inputs]
        path = innermost_around(model.root, (maker, *users))
        if path:
            found.setdefault(path, not_handed_on(maker, value))
    return found


def _values_handed_on(model: TracedModel, microbatch: Microbatch) -> Mapping[str, object]:
    """Returns what layers give other layers in a forward and is no tensor, by name."""
    used = {name for layer in model.layers for name in layer.inputs}
    names = [name for layer in model.layers for name in layer.outputs if name in used]
    whole = extract(model, [layer.name for layer in model.layers], model.inputs, names, device=device_of(model.root))
    with trial(model.root) as one:
        one.begin_forward(0)
        values = whole.forward(*microbatch.copy().inputs)
    return {name: value for name, value in zip(names, values, strict=True) if not isinstance(value, Tensor)}


def innermost_around(root: nn.Module, layers: Iterable[str]) -> str:
    """Returns the path of the innermost module that is called, holds some layers, and is none of them."""
    names = [layer.partition("#")[0].split(".")[:-1] for layer in layers]
    common = []
    for several in zip(*names, strict=False):
        if len(set(several)) > 1:
            break
        common.append(several[0])
    while common and isinstance(root.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):  # never called
        common.pop()
    return ".".join(common)
