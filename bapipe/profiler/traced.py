"""Traces the module to measure, and holds its stages to the original."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bapipe.equivalence.check import Equivalence, Unchecked, example_microbatches
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.equivalence.earlier_forwards import layers_that_read_earlier_forwards
from bapipe.equivalence.losses import loss_over_parts
from bapipe.equivalence.mixed_samples import outputs_over_parts
from bapipe.equivalence.outcome import Loss
from bapipe.errors import InvalidModel
from bapipe.formats.profile import EQUIVALENCE, LOSS, LOSS_OVER_PARTS, ONE_LAYER, SHARED_BUFFERS
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.prepare import fits_on_device
from bapipe.torch_settings import autocast_dtype
from bapipe.tracing.changing_state import layers_that_keep_values, shared_changing_buffers
from bapipe.tracing.layers import trace
from bapipe.tracing.model import TracedModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedForProfile:
    """A module's layers.

    Attributes:
        notes: for the profile's environment.
        keep_values: the layers in which a forward leaves values that the next one may read; empty if nothing was
            compared.
    """

    model: TracedModel
    notes: dict[str, object]
    keep_values: frozenset[str] = frozenset()


def traced(
    module: nn.Module,
    inputs: Sequence[Tensor],
    target: Tensor,
    loss: Loss,
    device: torch.device,
    options: ProfileOptions,
) -> TracedForProfile:
    """Returns the layers of a module on a device, and what the profile says of them.

    Stages are not compared if layers are measured one by one: that needs the whole model.

    Raises:
        InvalidModel: the module cannot be traced, or its stages would not train as it does.
    """
    keep_values: frozenset[str] = frozenset()
    max_size = max(options.microbatch_sizes)
    why_not = _why_not_compared(module, device, options)
    if why_not is None:
        # Two of a size, for what a forward keeps for the next; and one of another size.
        sizes = [min(size, max_size) for size in (2, 2, 3)]
        microbatches = example_microbatches(inputs, target, sizes, device)
        model, result = trace_checked(
            module,
            inputs,
            loss,
            microbatches,
            leaf_modules=options.leaf_modules,
            operator_layers=options.operator_layers,
            max_size=max_size,
        )
        if isinstance(result, Equivalence):
            keep_values = layers_that_keep_values(model, result.changed)
            keep_values |= layers_that_read_earlier_forwards(model, microbatches)
    else:
        model = trace(
            module,
            inputs,
            leaf_modules=options.leaf_modules,
            operator_layers=options.operator_layers,
            microbatch_size=max_size,
        )
        result = Unchecked(reason=why_not)
    if options.check and isinstance(result, Unchecked):
        _log.warning("%s", result)
    if options.settings.autocast is not None:
        model = _as_trained(model, inputs, options)
    if any(layer.name == LOSS for layer in model.layers):
        raise InvalidModel(f"a layer of the model is named '{LOSS}', as the loss itself is: rename it")
    notes: dict[str, object] = {EQUIVALENCE: str(result)}
    if isinstance(result, Equivalence):
        (batch,) = example_microbatches(inputs, target, [4 if max_size >= 4 else 2], device)
        fault = outputs_over_parts(module, batch) or loss_over_parts(module, loss, batch)
        if fault is not None:
            _log.warning("%s", fault)
            notes[LOSS_OVER_PARTS] = fault
    one_layer = {
        path: reason.with_advice
        for path, reason in model.leaf_reasons.items()
        if _has_several_layers(module.get_submodule(path))
    }
    notes |= {ONE_LAYER: one_layer} if one_layer else {}
    shared = shared_changing_buffers(model)
    notes |= {SHARED_BUFFERS: {name: list(layers) for name, layers in shared.items()}} if shared else {}
    return TracedForProfile(model=model, notes=notes, keep_values=keep_values)


def _has_several_layers(part: nn.Module) -> bool:
    """Returns whether modules inside one that is one layer have parameters: without these, cutting it gains nothing."""
    return any(next(child.parameters(), None) is not None for child in part.children())


def _why_not_compared(module: nn.Module, device: torch.device, options: ProfileOptions) -> str | None:
    """Returns why the stages are not held to the original; None if they are."""
    if not options.check:
        return "that was not asked for"
    if options.layer_by_layer:
        return "it is measured layer by layer"
    if not fits_on_device(module, device, copies=4):  # values before, and gradients of both
        return "there is not enough memory for it"
    return None


def _as_trained(model: TracedModel, inputs: Sequence[Tensor], options: ProfileOptions) -> TracedModel:
    """Returns the same layers traced in autocast; the model itself if they are others then, or it cannot be traced.

    What was compared, to the last digit, is the model without autocast: its code reads other types in it.
    """
    leaves = (*options.leaf_modules, *model.leaf_reasons)
    try:
        found = trace(
            model.root,
            inputs,
            leaf_modules=leaves,
            operator_layers=options.operator_layers,
            called_leaves=bool(model.leaf_reasons),
            microbatch_size=max(options.microbatch_sizes),
            autocast=autocast_dtype(options.settings),
            inlined=sorted(model.inlined),
        )
    except InvalidModel:
        return model
    if [layer.name for layer in found.layers] != [layer.name for layer in model.layers]:
        return model
    return replace(found, leaf_reasons=model.leaf_reasons, inlined=model.inlined, changed=model.changed)
