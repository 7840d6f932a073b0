"""Greedy decoding by a pipeline: the most likely word, one after another."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.runtime.pipeline import Pipeline
from bapipe.torch_device import CPU
from bapipe.zoo.example import GenerationConfig


def greedy_decode(
    pipeline: Pipeline,
    config: GenerationConfig,
    inputs: Sequence[Tensor | None],
    shape: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Returns the most likely words, chosen one after another, the same on every rank. [samples, length] = `shape`

    Each word takes a forward pass of the whole model over all words so far: nothing is cached between them. After the
    end of a text comes padding.
    """
    num_samples, length = shape
    prefix, words = (torch.full(shape, config.pad, device=CPU) for _ in range(2))  # the model's input; its output
    prefix[:, 0] = config.bos
    unfinished = torch.ones(num_samples, dtype=torch.bool, device=CPU)
    for position in range(length):
        # Ranks that do not load the words have None there.
        given = [prefix if i == config.input_index and x is not None else x for i, x in enumerate(inputs)]
        next_words = _next_words(pipeline, given, position, num_samples, device)
        words[:, position] = torch.where(unfinished, next_words, config.pad)
        unfinished &= words[:, position] != config.eos
        if not unfinished.any() or position + 1 == length:
            break
        prefix[:, position + 1] = torch.where(unfinished, words[:, position], config.pad)
    return words


def _next_words(
    pipeline: Pipeline, inputs: Sequence[Tensor | None], position: int, num_samples: int, device: torch.device
) -> Tensor:
    """Returns the most likely word at a position of each text, on every rank. [samples]"""
    result = pipeline.evaluate(*inputs, num_samples=num_samples, keep=lambda scores: scores[:, position].argmax(-1))
    chosen = torch.zeros(num_samples, dtype=torch.int64, device=device)
    if result is not None:
        for rows, words in zip(result.rows, result.outputs, strict=True):
            chosen[rows.start : rows.stop] = words
    dist.all_reduce(chosen)  # each row is nonzero on at most one rank, so the sum broadcasts it
    return chosen.cpu()
