"""Models of Hugging Face's transformers, small, without dropout, with a batch to train them on."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Case = tuple[nn.Module, tuple[Tensor, ...], Tensor, Callable[[Any, Tensor], Tensor]]

WORDS, LENGTH, ROWS = 50, 7, 4


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=16, bos_token_id=0, eos_token_id=0,
        use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), (_words(),), _words(), _of_words


def bert() -> Case:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=WORDS,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), (_words(), _mask()), _words(), _of_words


def t5() -> Case:
    config = transformers.T5Config(
        num_layers=2, d_model=16, d_kv=8, num_heads=2, d_ff=32, vocab_size=WORDS, use_cache=False, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), (_words(), _mask(), _words()), _words(), _of_words


def vit() -> Case:
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), (torch.randn(ROWS, 3, 16, 16),), _classes(), _of_classes


def resnet() -> Case:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[8, 16], depths=[2, 1], num_labels=5)
    return transformers.ResNetForImageClassification(config), (torch.randn(ROWS, 3, 32, 32),), _classes(), _of_classes


MODELS: dict[str, Callable[[], Case]] = {"gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit, "resnet": resnet}


def _words() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH))


def _mask() -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor([[7], [5], [6], [3]])).long()


def _classes() -> Tensor:
    return torch.randint(0, 5, (ROWS,))


def _of_words(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def _of_classes(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output.logits, target)
