"""A model and how to train it: what a factory returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from bapipe.tracing.bound_inputs import Inputs, tensor_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How a model generates texts word by word, and how the texts are scored.

    The data set then has `text(tokens)` and `reference(index)`, see `bapipe.PipelineDataset`.

    Attributes:
        input_index: the input with the words so far, [n, length]; the output is [n, length, vocabulary].
        bos, eos, pad: the words before a text, at its end, and after it.
        scores: by name, (texts, references) -> one score for all texts.
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
        module: the model.
        inputs: example inputs, by position or, as a mapping, by name: tensors, batch first, of any batch size; and
            constants that the forward takes, such as None or flags.
        target: an example target of the same batch size.
        loss: (output, target) -> mean loss over the batch, a scalar.
        data: opens the data that a user names, such as synthetic or a folder; items are (input, target), or
            ((input, ...), target) for several tensors in `inputs`, in their order; if None, only synthetic data, made
            like the example inputs. See `bapipe.PipelineDataset` for optional methods.
        metrics: by name, (output, target) -> a value for each sample; their means over held-out samples are reported.
        generation: how the model generates text; None for models that do not.
        learning_rate: the default, for SGD with momentum 0.9.
        initialize: sets the parameters of one layer's module in place, after its `reset_parameters()`. A run calls it
            only if that gives the parameters the values, up to random draws, that the factory gave them, or if the
            factory left torch's own; then no process holds more than its stages. Else it keeps the factory's values.
    """

    module: nn.Module
    inputs: Inputs
    target: Tensor
    loss: Callable[[Any, Tensor], Tensor]
    data: Callable[[str], Dataset[Any]] | None = None
    initialize: Callable[[nn.Module], None] | None = None
    learning_rate: float = 0.01
    metrics: Mapping[str, Callable[[Any, Tensor], Tensor]] = field(default_factory=dict)
    generation: GenerationConfig | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the example inputs, in their order, which is that of the data's items."""
        return tensor_inputs(self.inputs)
