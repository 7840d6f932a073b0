"""A model of Hugging Face's transformers, built from a config: in this folder, bapipe profile hugging_face:gpt2

The same goes for any model of another package: say how it is built, with what it is trained, and what its loss is.
"""

from functools import partial

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import bapipe
from bapipe.zoo.data.language_modeling import next_token_texts
from bapipe.zoo.gpt2 import next_word_loss


def loss(output: CausalLMOutputWithCrossAttentions, target: Tensor) -> Tensor:
    """The model gives an object in which the scores are one of several things."""
    assert output.logits is not None
    return next_word_loss(output.logits, target)


def gpt2(num_layers: int = 4, hidden_size: int = 128, num_heads: int = 4, length: int = 64) -> bapipe.Example:
    """GPT-2 of any size, on bytes: `--data pydoc` or `--data my_text.txt`."""
    config = GPT2Config(
        n_layer=num_layers,
        n_embd=hidden_size,
        n_head=num_heads,
        n_positions=length,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return bapipe.Example(
        module=GPT2LMHeadModel(config),
        inputs=(torch.zeros(1, length, dtype=torch.long),),
        target=torch.zeros(1, length, dtype=torch.long),
        loss=loss,
        data=partial(next_token_texts, vocabulary_size=256, length=length),
        learning_rate=0.02,
    )


if __name__ == "__main__":
    example = gpt2()
    profile = bapipe.profile(
        example.module, example.inputs, example.target, example.loss, name="gpt2", microbatch_sizes=(4, 8)
    )
    plan = bapipe.plan(profile, 2, minibatch_size=32, num_stages=2)
    for stage in plan.stages:
        print(f"{stage.devices[0]}: {stage.layers[0]} to {stage.layers[-1]}")
    result = bapipe.run(plan, factory="hugging_face:gpt2", data="pydoc", steps=20)
    print(f"predicted {plan.prediction.step_ns / 1e6:.1f} ms a step, measured {result.typical_step_ns / 1e6:.1f} ms")
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}")
