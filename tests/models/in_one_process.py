"""Trains an architecture as a pipeline whose stages are all in this process, and compares with its own code."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

from bapipe.runtime import cut_model as cut_model_module
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.bound_inputs import only_tensor_inputs
from bapipe.tracing.layers import trace
from bapipe.tracing.model import TracedModel
from tests.models.architectures import Architecture
from tests.models.random_partitions import Trained, random_stages
from tests.multiprocess.runtime_cases import make_plan_of

NUM_MICROBATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the stages of a random partition are trained.

    Attributes:
        seed: of the partition, into 2 + seed % 3 stages, and of the order of W.
        split: whether backwards are I and W.
        recompute: whether every stage recomputes.
        recompute_some: whether every stage recomputes about half of its layers.
    """

    seed: int
    split: bool = False
    recompute: bool = False
    recompute_some: bool = False


def whole_step(architecture: Architecture, num_microbatches: int = NUM_MICROBATCHES) -> Trained:
    """Loss, gradients and buffers after a step of a copy by its own code, micro-batch by micro-batch."""
    module = copy.deepcopy(architecture.module)
    total = torch.zeros(())
    for m in range(num_microbatches):
        inputs = {name: value.chunk(num_microbatches)[m].clone() for name, value in architecture.inputs.items()}
        target = architecture.target.chunk(num_microbatches)[m]
        loss = architecture.loss(module(**inputs), target) / num_microbatches
        loss.backward()
        total = total + loss.detach()
    return trained(total, module)


def trained(loss: Tensor, module: nn.Module) -> Trained:
    """Loss, gradients and buffers of a module, where they are."""
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return Trained(loss, grads, {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta})


@contextmanager
def traced_once(model: TracedModel) -> Iterator[None]:
    """A pipeline that is made of the model's module does not trace it again."""
    with patch.object(cut_model_module, "trace", lambda *_, **__: model):
        yield


class OneProcess:
    """An architecture that is traced once, and trained under several settings from the same values."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        module = architecture.module
        with only_tensor_inputs(module, architecture.inputs) as tensors:
            self.model: TracedModel = trace(module, tensors)
        self._before = {name: t.detach().clone() for name, t in _state(module).items()}

    def step(self, setting: Setting) -> Trained:
        """Loss, gradients and buffers after one step in stages."""
        architecture, stages = self._architecture, self._stages(setting)
        module, ranks = architecture.module, [0] * len(stages)
        order = [_order(len(stages), setting.split, setting.seed)]
        recompute = range(len(stages)) if setting.recompute else ()
        size = len(architecture.target) // NUM_MICROBATCHES
        again = self._some_layers(setting.seed) if setting.recompute_some else ()
        plan = make_plan_of(stages, ranks, order, size, NUM_MICROBATCHES, recompute, again)
        module.zero_grad()
        with torch.no_grad():
            for name, tensor in _state(module).items():
                tensor.copy_(self._before[name])
        with traced_once(self.model):
            pipeline = Pipeline(
                module, plan, loss=architecture.loss, inputs=architecture.inputs, optimizer=sgd(0.0), check=False
            )  # fmt: skip
        loss = pipeline.step(*architecture.inputs.values(), target=architecture.target)
        assert loss is not None
        return trained(torch.tensor(loss, dtype=torch.float64), module)

    def _some_layers(self, seed: int) -> set[str]:
        """About half of the layers; of those of which one changes what another reads, both or none."""
        rng, group = random.Random(seed), {layer.name: layer.name for layer in self.model.layers}
        for hazard in self.model.hazards:
            first, second = group[hazard.writer], group[hazard.reader]
            group |= {name: first for name, old in group.items() if old == second}
        chosen = {first for first in sorted(set(group.values())) if rng.random() < 0.5}
        return {name for name, first in group.items() if first in chosen}

    def _stages(self, setting: Setting) -> list[list[str]]:
        return random_stages(self.model, 2 + setting.seed % 3, random.Random(setting.seed))


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in (*module.named_parameters(), *module.named_buffers()) if not t.is_meta}


def _order(num_stages: int, split: bool, seed: int) -> list[str]:
    """Returns an order for one device: all forwards, micro-batch by micro-batch; backwards; W, if apart, at random."""
    stages, microbatches = range(num_stages), range(NUM_MICROBATCHES)
    forwards = [f"{s}F{m}" for m in microbatches for s in stages]
    backwards = [f"{s}{'I' if split else 'B'}{m}" for m in microbatches for s in reversed(stages)]
    weights = [f"{s}W{m}" for m in microbatches for s in stages] if split else []
    random.Random(seed).shuffle(weights)
    return [*forwards, *backwards, *weights]


def largest_error(got: Trained, want: Trained) -> tuple[str, float]:
    """The name of what differs most from what is wanted, relative to the largest element; infinity where one lacks."""
    errors = {"loss": abs(float(got.loss) - float(want.loss)) / max(1.0, abs(float(want.loss)))}
    for kind, ours, theirs in (("gradient", got.grads, want.grads), ("buffer", got.buffers, want.buffers)):
        for name in {*ours, *theirs} if kind == "gradient" else set(ours):
            errors[f"{kind} of {name}"] = _error(ours.get(name), theirs.get(name))
    worst = max(errors, key=errors.__getitem__)
    return worst, errors[worst]


def _error(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        other = want if got is None else got
        return float("inf") if other is not None and other.any() else 0.0
    if got.shape != want.shape or got.dtype != want.dtype or not got.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    distance = (got - want).abs().max() / want.abs().max().clamp_min(1e-3) if got.numel() else torch.zeros(())
    return float(distance) if distance.isfinite() else float("inf")
