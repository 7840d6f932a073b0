"""What a forward changes in a model: which layers must share a stage for it, and which must not have replicas."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bapipe.module_state.python_state import generators_kept, values_restored
from bapipe.tracing.aliasing import maybe_written_buffers, written_buffers
from bapipe.tracing.model import TracedModel, attribute, layer_states, state_names

_RUNNING_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""Names of the buffers of batch norm, and of other norms, that a forward in training changes but does not read."""


def is_read_by_next_forward(name: str) -> bool:
    """Returns whether the next forward may read a parameter or buffer of this name that a forward has changed."""
    return name.rpartition(".")[2] not in _RUNNING_STATISTICS


def limited_embeddings(module: nn.Module) -> list[Tensor]:
    """Returns the weights of which a forward changes the rows that it reads: those of embeddings with `max_norm`."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return [part.weight for part in module.modules() if isinstance(part, kinds) and part.max_norm is not None]


@contextmanager
def limited_embeddings_restored(*modules: nn.Module) -> Iterator[None]:
    """Forwards may run in this context; afterwards the weights of embeddings with `max_norm` are what they were."""
    limited = {id(weight): weight for module in modules for weight in limited_embeddings(module)}
    with values_restored(limited.values()):
        yield


def layers_that_keep_values(model: TracedModel, changed: Collection[str]) -> frozenset[str]:
    """Returns the layers in which a forward leaves values that the next forward may read.

    `changed` are the names of the parameters and buffers that a forward of the model changes.
    """
    kept = {name for name in changed if is_read_by_next_forward(name)}
    names = state_names(model.root)
    return frozenset(
        layer
        for layer, state in layer_states(model).items()
        if any(not kept.isdisjoint(names.get(id(tensor), ())) for tensor in state.values())
    )


def layers_in_one_stage(model: TracedModel) -> list[tuple[str, ...]]:
    """Returns layers that must share a stage, whose parameters need not have anything in common.

    These are the layers that use the same changing buffer, and the two of an in-place change that the reader must see,
    or that in the model's order comes before it must not.
    """
    place = {layer.name: index for index, layer in enumerate(model.layers)}
    changes = {(hazard.reader, hazard.writer) for hazard in model.hazards if hazard.is_broken(place)}
    return [*sorted(set(shared_changing_buffers(model).values())), *sorted(changes)]


def shared_changing_buffers(model: TracedModel) -> dict[str, tuple[str, ...]]:
    """Returns the layers of each buffer that several use and that training changes, by the buffer's name.

    Of the buffers that may be changed besides those of operators of torch (`maybe_written_buffers`), these are the ones
    that a forward was seen to change, if it was run for that; else all.
    """
    names = state_names(model.root)
    changing = written_buffers(model).keys() | {
        number
        for number in maybe_written_buffers(model)
        if model.changed is None or not model.changed.isdisjoint(names.get(number, ()))
    }
    users: dict[int, tuple[str, list[str]]] = {}
    for layer, state in layer_states(model).items():
        for number, name in {id(tensor): name for name, tensor in state.items() if id(tensor) in changing}.items():
            users.setdefault(number, (name, []))[1].append(layer)
    return {name: tuple(layers) for name, layers in users.values() if len(layers) > 1}


def changing_buffers(model: TracedModel) -> frozenset[str]:
    """Returns all names of the buffers that training may change."""
    names = state_names(model.root)
    return frozenset(
        name for number in written_buffers(model) | maybe_written_buffers(model) for name in names.get(number, ())
    )


def layers_with_own_generators(model: TracedModel) -> frozenset[str]:
    """Returns the layers that hold a random generator of their own, of which each forward leaves the next one another.

    It may be an attribute of a module, or a constant that one of its operators is given.
    """
    holding = {
        layer
        for node, layer in model.layer_of.items()
        if (node.op == "call_module" and generators_kept(model.module.get_submodule(str(node.target))))
        or any(
            source.op == "get_attr" and isinstance(attribute(model.module, str(source.target)), torch.Generator)
            for source in node.all_input_nodes
        )
    }
    return frozenset(holding)
