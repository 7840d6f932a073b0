"""Random legal partitions of a model, run stage after stage in one process, as ranks would."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.formats.profile import LOSS
from bapipe.runtime.rng import PerOperatorRng
from bapipe.runtime.split import split
from bapipe.tracing.layers import trace
from bapipe.tracing.model import TracedModel, state_names, unused_state
from bapipe.tracing.stage_module import stage_module
from bapipe.tracing.stages import Split
from tests.multiprocess.runtime_cases import make_plan_of, named_order

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Trained:
    """What one pass leaves behind."""

    loss: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def random_stages(model: TracedModel, num_stages: int, rng: random.Random) -> list[list[str]]:
    """Returns the layers of each stage, the loss on the last; no tensor flows backwards, no other rule is kept."""
    made_in = {name: layer.name for layer in model.layers for name in layer.outputs}
    stage_of: dict[str, int] = {}
    bias = rng.random()
    for place, layer in enumerate(model.layers):
        earliest = max((stage_of[made_in[name]] for name in layer.inputs if name in made_in), default=0)
        wanted = int(num_stages * place / len(model.layers) + rng.random() - 0.5)
        late = min(max(earliest, wanted), num_stages - 1)
        stage_of[layer.name] = rng.randint(earliest, late) if rng.random() < bias else late
    stages: list[list[str]] = [[] for _ in range(num_stages)]
    for layer in model.layers:
        stages[stage_of[layer.name]].append(layer.name)
    stages = [stage for stage in stages if stage]
    stages[-1].append(LOSS)
    return stages


def whole(module: nn.Module, inputs: Sequence[Tensor], target: Tensor, loss: Loss) -> Trained:
    """One pass of a copy of the module, by its own code."""
    own = copy.deepcopy(module)
    value = loss(own(*inputs), target)
    value.backward()
    return Trained(value.detach(), _grads(own), _buffers(own))


def in_stages(
    parts: Split, inputs: Sequence[Tensor], target: Tensor, loss: Loss, draws: PerOperatorRng | None
) -> Trained:
    """One pass stage after stage: only the tensors of a cut are handed on, and only their gradients back."""
    modules = [stage_module(parts, s, torch.device("cpu"), draws) for s in range(len(parts.stages))]
    given = dict(zip(parts.model.inputs, inputs, strict=True))
    held: dict[str, Tensor] = {}
    passes = []
    for stage, module in zip(parts.stages, modules, strict=True):
        received = []
        for name in stage.received:
            example = parts.examples[name]
            assert (held[name].shape, held[name].dtype) == (example.shape, example.dtype), name
            assert held[name].requires_grad == example.requires_grad, name
            received.append(held[name].detach().clone().requires_grad_(example.requires_grad))
        outputs = module(*received, *(given[name] for name in stage.loaded))
        held = dict(zip(stage.outputs, outputs, strict=True))
        passes.append((received, outputs))
    value = loss(parts.model.result.rebuild(outputs), target)
    value.backward()
    for s in range(len(passes) - 1, 0, -1):
        pairs = [
            (output, tensor.grad)
            for output, tensor in zip(passes[s - 1][1], passes[s][0], strict=True)
            if output.requires_grad and tensor.grad is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    names = _names(parts.model.root)
    grads_of = {name: p.grad.clone() for name, p in names.items() if p.grad is not None}
    parts.model.root.zero_grad()
    return Trained(value.detach(), grads_of, _buffers(parts.model.root))


def check_all_state_is_somewhere(parts: Split) -> None:
    """Every parameter is in the stages that use it and nowhere else, under its own names; none is lost."""
    names = state_names(parts.model.root)
    keys: dict[str, list[int]] = {}
    for s in range(len(parts.stages)):
        module = stage_module(parts, s)
        held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for name in (name for key in held for name in names.get(key, ())):
            keys.setdefault(name, []).append(s)
    idle = unused_state(parts.model)
    assert set(parts.model.root.state_dict()) <= {*keys, *idle}
    assert not set(keys) & set(idle)
    shared = {id(one.parameter): list(one.stages) for one in parts.tied}
    for name, parameter in parts.model.root.named_parameters(remove_duplicate=False):
        if len(keys[name]) > 1:
            assert keys[name] == shared[id(parameter)], name


def partition(model: TracedModel, stages: list[list[str]], inputs: Sequence[Tensor], size: int) -> Split | None:
    """Returns the stages of a model, or None if changes in place forbid this partition."""
    plan = make_plan_of(stages, range(len(stages)), named_order("gpipe", len(stages), 1), size, 1)
    try:
        return split(model, plan, inputs)
    except InvalidModel as error:
        if "changes in place" not in str(error):
            raise
        return None


def check(module: nn.Module, inputs: Sequence[Tensor], target: Tensor, loss: Loss, seeds: range) -> int:
    """Compares random partitions with the whole model; returns how many ran."""
    ran = 0
    model = trace(module, inputs)
    want = whole(module, inputs, target, loss)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for seed in seeds:
        rng = random.Random(seed)
        parts = partition(model, random_stages(model, 2 + seed % 3, rng), inputs, len(target))
        if parts is None:
            continue
        ran += 1
        check_all_state_is_somewhere(parts)
        got = in_stages(parts, inputs, target, loss, None)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=1e-12)
        assert set(got.grads) == set(want.grads)
        for name, grad in want.grads.items():
            torch.testing.assert_close(got.grads[name], grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        for name, buffer in want.buffers.items():
            torch.testing.assert_close(got.buffers[name], buffer, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    return ran


def _names(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def _grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in _names(module).items() if p.grad is not None}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}
