"""Llama with LoRA (arXiv:2106.09685): in this folder, bapipe run lora:llama --data pydoc

Only the small matrices are trained. Everything else is frozen, which is all that bapipe has to see: it plans for
gradients, optimizer state and all-reduces of what is trained. What the package peft makes of a model can be given as it
is, too: `module=get_peft_model(model, LoraConfig(...))`.
"""

from torch import Tensor, nn

import bapipe
from bapipe.zoo.factory import build


class Adapted(nn.Module):
    """A linear layer that is not trained, plus a product of two small matrices that are; at first that is zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.up(self.down(x))
        return adapted


def llama(
    num_layers: int = 6,
    hidden_size: int = 256,
    vocabulary_size: int = 4096,
    length: int = 64,
    rank: int = 8,
    first: int = 0,
) -> bapipe.Example:
    """Llama with corrections of the queries and values of all blocks from `first` on."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "vocab_size": vocabulary_size}
    arguments = {"num_hidden_layers": num_layers, "num_attention_heads": 4, "length": length, **sizes}
    example = build("bapipe.zoo.hugging_face:LlamaForCausalLM", arguments)
    example.module.requires_grad_(False)
    for name, layer in list(example.module.named_modules()):
        path, _, last = name.rpartition(".")
        if last in ("q_proj", "v_proj") and int(name.split(".")[2]) >= first:
            assert isinstance(layer, nn.Linear)
            setattr(example.module.get_submodule(path), last, Adapted(layer, rank))
    return example
