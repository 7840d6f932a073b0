"""Models of transformers from the name of a class and settings of its config."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bapipe.errors import InvalidModel
from bapipe.tracing.bound_inputs import only_tensor_inputs
from bapipe.zoo import resolve
from bapipe.zoo.factory import build

TEXTS: dict[str, object] = {
    "vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "length": 5,
}  # fmt: skip

IMAGES: dict[str, object] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 16, "patch_size": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "scores"),
    [
        ("GPT2LMHeadModel", TEXTS, (2, 5, 23)),
        ("LlamaForCausalLM", TEXTS | {"intermediate_size": 8}, (2, 5, 23)),
        ("BertForMaskedLM", TEXTS | {"intermediate_size": 8}, (2, 5, 23)),
        ("BertForSequenceClassification", TEXTS | {"intermediate_size": 8}, (2, 2)),
        ("BertForSequenceClassification", TEXTS | {"intermediate_size": 8, "num_labels": 7}, (2, 7)),
        ("DistilBertForTokenClassification", TEXTS | {"hidden_dim": 8}, (2, 5, 2)),
        (
            "T5ForConditionalGeneration",
            {"vocab_size": 23, "d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "d_ff": 8, "length": 5},
            (2, 5, 23),
        ),
        ("ViTForImageClassification", IMAGES, (2, 2)),
        ("ViTForImageClassification", IMAGES | {"num_labels": 5}, (2, 5)),
    ],
)  # fmt: skip
def test_a_class_is_built_from_its_settings_and_can_be_trained(
    name: str, settings: dict[str, object], scores: tuple[int, ...]
) -> None:
    example = build(resolve(f"hf:{name}"), settings)
    assert type(example.module).__name__ == name
    with only_tensor_inputs(example.module, example.inputs) as tensors:
        output = example.module(*tensors)
    assert output.logits.shape == scores
    loss = example.loss(output, example.target)
    halves = [example.loss({"logits": output.logits[i : i + 1]}, example.target[i : i + 1]) for i in range(2)]
    assert loss.item() == pytest.approx(sum(half.item() for half in halves) / 2)
    loss.backward()
    assert sum(p.grad is not None for p in example.module.parameters()) > 3


def test_texts_to_go_on_with_are_the_data_of_a_causal_model() -> None:
    example = build(resolve("hf:GPT2LMHeadModel"), TEXTS)
    assert example.data is not None
    words, target = example.data("synthetic")[0]
    assert torch.equal(words[1:], target[:-1])
    assert getattr(example.module.config, "eos_token_id", None) == 0  # its own one is not in so small a vocabulary
    assert words.shape == (5,)
    assert isinstance(example.module.get_submodule("transformer.h"), nn.ModuleList)
    assert len(example.module.get_submodule("transformer.h")) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "LamaForCausalLM",
            {},
            r"^transformers [\d.]+ has no class 'LamaForCausalLM'; did you mean 'LlamaForCausalLM'\?$",
        ),
        ("GPT2Config", {}, r"^hf:GPT2Config: want a class that ends in ForCausalLM, LMHeadModel, "),
        ("GPT2LMHeadModel", {"n_layers": 2}, r"^GPT2Config has no setting 'n_layers'; did you mean 'n_layer'\?$"),
        (
            "ViTForImageClassification",
            {"num_label": 5},
            r"^ViTConfig has no setting 'num_label'; did you mean 'num_labels'\?$",
        ),
        ("LlamaForCausalLM", {"max_length": 5}, r"^LlamaConfig has no setting 'max_length'"),  # of generated texts
        ("GPT2LMHeadModel", {"rope_theta": 1.0}, r"^GPT2Config has no setting 'rope_theta'$"),
        ("GPT2LMHeadModel", {"length": 0}, r"ValueError: length is 0; want an integer of at least 1$"),
        ("GPT2LMHeadModel", {"length": True}, r"ValueError: length is True; want an integer of at least 1$"),
        ("GPT2LMHeadModel", {"length": "5"}, r"ValueError: length is '5'; want an integer of at least 1$"),
        (
            "BertForSequenceClassification",
            {"num_labels": 0},
            r"ValueError: num_labels is 0; want an integer of at least 1$",
        ),
        ("ViTForImageClassification", IMAGES | {"length": 7}, r"^length is 7, and images have none: leave it out"),
    ],
)
def test_what_is_wrong_with_a_name_or_a_setting(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        build(resolve(f"hf:{name}"), settings)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("rope_theta", 500.0, lambda config: config.rope_parameters["rope_theta"]),
        ("attn_implementation", "eager", lambda config: config._attn_implementation),
        ("num_attention_heads", 4, lambda config: config.num_attention_heads),
    ],
)
def test_a_setting_may_be_one_that_the_config_keeps_under_another_name(
    name: str, value: object, read: Callable[[Any], object]
) -> None:
    example = build(resolve("hf:LlamaForCausalLM"), TEXTS | {"intermediate_size": 8, name: value})
    assert read(example.module.config) == value


def test_a_class_without_a_vocabulary_says_what_to_do() -> None:
    with pytest.raises(InvalidModel, match=r"^CanineConfig has no `vocab_size`.*write a function that returns"):
        build(resolve("hf:CanineForSequenceClassification"), {"hidden_size": 16, "num_hidden_layers": 1})
