"""A model with what it takes to train it; what a factory named on the command line returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How a model generates texts, word by word from the words so far, and how the texts are scored.

    The data then has `text(words)`, the text of some words, and `reference(index)`, the correct text of an item.

    Attributes:
        input_index: which input holds the words so far, [n, length]; the output is [n, length, vocabulary].
        bos, eos, pad: the words before a text, at its end, and after it.
        scores: by name, (texts, references) -> a score of all of them.
    """

    input_index: int
    bos: int
    eos: int
    pad: int
    scores: Mapping[str, Callable[[Sequence[str], Sequence[str]], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model and how to train it.

    Attributes:
        module: the model; on the meta device where its factory was called there.
        inputs: example inputs, batch first, of any batch size.
        target: an example target of the same batch size.
        loss: (output, target) -> mean loss over the batch, a scalar.
        data: opens what `--data` names; items are (input, target), or ((input, ...), target) for several inputs. The
            data may have `part(index, place)`, which gives input `place` of an item, or its target where `place` is
            the number of inputs, so that a rank loads no more than it uses; `held_out`, other data to evaluate on;
            `forms` with `form(index)`, see `bapipe.zoo.data.buckets`; and `at_epoch(number)`, the data as it is in one
            pass over it.
        metrics: by name, (output, target) -> a value for each sample, whose mean over held-out samples is reported.
        generation: how the model generates texts; None if it generates none.
        learning_rate: one that trains the model with SGD, momentum 0.9, where nothing else is said.
        initialize: sets the parameters of one layer's module in place; None takes its `reset_parameters()`.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor
    loss: Callable[[Any, Tensor], Tensor]
    data: Callable[[str], Dataset[Any]] | None = None
    initialize: Callable[[nn.Module], None] | None = None
    learning_rate: float = 0.01
    metrics: Mapping[str, Callable[[Any, Tensor], Tensor]] = field(default_factory=dict)
    generation: GenerationConfig | None = None
