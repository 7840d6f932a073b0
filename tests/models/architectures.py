"""Architectures of Hugging Face's transformers, tiny and without dropout, with a batch and a loss to train them on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WORDS, LENGTH, ROWS, CLASSES = 50, 8, 4, 5


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model and how to train it; `inputs` are by name. Values are float64 unless the model allows float32 alone."""

    module: nn.Module
    inputs: Mapping[str, Tensor]
    target: Tensor
    loss: Callable[[Any, Tensor], Tensor]


def _words() -> Tensor:
    return torch.randint(3, WORDS, (ROWS, LENGTH))


def _mask() -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor([[8], [6], [7], [6]])).long()


def _classes() -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,))


def of_words(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of every word."""
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def of_classes(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of a class per sample."""
    return cross_entropy(output.logits, target)


def _of_pairs(output: Any, target: Tensor) -> Tensor:
    """The contrastive loss of CLIP: the i-th text belongs to the i-th image."""
    pairs = torch.arange(len(target))
    return cross_entropy(output.logits_per_text, pairs) + cross_entropy(output.logits_per_text.T, pairs)


def _of_boxes(output: Any, target: Tensor) -> Tensor:
    """Classes and boxes, each in its place."""
    return cross_entropy(output.logits.flatten(0, 1), target.flatten()) + output.pred_boxes.square().mean()


def _of_frames(output: Any, target: Tensor) -> Tensor:
    """One word for all frames of a sample."""
    frames = target[:, :1].expand(-1, output.logits.shape[1])
    return cross_entropy(output.logits.flatten(0, 1), frames.flatten())


def _model(name: str, config: str, settings: Mapping[str, Any]) -> nn.Module:
    """Returns a model of transformers from its config, with every dropout off."""
    made = getattr(transformers, config)(**settings)
    for key, value in vars(made).items():
        if "drop" in key and isinstance(value, float):
            setattr(made, key, 0.0)
    module: nn.Module = getattr(transformers, name)(made).train()
    return module


def _double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.double() if value.is_floating_point() else value for key, value in tensors.items()}


def _architecture(
    name: str,
    config: str,
    settings: Mapping[str, Any],
    inputs: Callable[[], Mapping[str, Tensor]],
    target: Callable[[], Tensor],
    loss: Callable[[Any, Tensor], Tensor],
    *,
    single: bool = False,
    change: Callable[[nn.Module], object] = lambda module: None,
) -> Architecture:
    torch.manual_seed(0)
    module, given = _model(name, config, settings), inputs()
    change(module)
    if not single:
        module, given = module.double(), _double(given)
    with torch.no_grad():
        for parameter in module.parameters():  # unlike the values it starts from, so that every parameter shows
            parameter += 0.05 * torch.randn_like(parameter)
    return Architecture(module=module, inputs=given, target=target(), loss=loss)


def _text() -> dict[str, Tensor]:
    return {"input_ids": _words(), "attention_mask": _mask()}


def _pair_of_texts() -> dict[str, Tensor]:
    return {**_text(), "decoder_input_ids": _words()}


def _image(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, size, size)}


_SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 1}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {
    "vocab_size": WORDS,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_T5 = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 32, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
_VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8,
    "image_size": 32, "num_labels": CLASSES,
}  # fmt: skip
_SWIN = {
    "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
    "num_labels": CLASSES,
}  # fmt: skip
_CONVOLUTIONS = {"num_labels": CLASSES, "hidden_sizes": [8, 16], "depths": [2, 1]}
_WAVES = {
    **_SIZES, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
}  # fmt: skip
_TOWERS = {
    "text_config": {**_SIZES, "max_position_embeddings": 16}, "vision_config": {**_VIT, "image_size": 16},
}  # fmt: skip

_DECODERS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": WORDS, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 4,
            "max_position_embeddings": 32, "attention_types": [[["global", "local"], 1]],
        },
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Phi": ("PhiForCausalLM", "PhiConfig", _SIZES),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", _SIZES),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", _GROUPED),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", _GROUPED),
    "StarCoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _GROUPED),
    "Cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "MPT": ("MptForCausalLM", "MptConfig", {"vocab_size": WORDS, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}),
    "OPT": ("OPTForCausalLM", "OPTConfig", {**_SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}),
}  # fmt: skip
_EXPERT_MODELS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", _EXPERTS),
    "GPT-OSS": ("GptOssForCausalLM", "GptOssConfig", {**_EXPERTS, "head_dim": 8, "sliding_window": 4}),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
}  # fmt: skip
_RECURRENT: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4, "pad_token_id": 2},
    ),
    "RWKV": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16, "intermediate_size": 32},
    ),
}  # fmt: skip
_ENCODERS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "BERT": ("BertForMaskedLM", "BertConfig", _SIZES),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", _SIZES),
    "DeBERTa": ("DebertaForMaskedLM", "DebertaConfig", {**_SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "DeBERTa-v2": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**_SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", {**_SIZES, "embedding_size": 8}),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32},
    ),
    "ELECTRA": ("ElectraForMaskedLM", "ElectraConfig", {**_SIZES, "embedding_size": 8}),
    "XLNet": ("XLNetLMHeadModel", "XLNetConfig", {"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}),
    "ModernBERT": ("ModernBertForMaskedLM", "ModernBertConfig", {**_SIZES, "local_attention": 4}),
    "MPNet": ("MPNetForMaskedLM", "MPNetConfig", _SIZES),
    "ConvBERT": ("ConvBertForMaskedLM", "ConvBertConfig", {**_SIZES, "embedding_size": 16, "conv_kernel_size": 3, "head_ratio": 1}),
    "Longformer": ("LongformerForMaskedLM", "LongformerConfig", {**_SIZES, "attention_window": 4}),
    "BigBird": ("BigBirdForMaskedLM", "BigBirdConfig", {**_SIZES, "attention_type": "original_full"}),
    "Perceiver": (
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        {
            "vocab_size": WORDS, "num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attention_heads": 2,
            "num_self_attends_per_block": 2, "num_cross_attention_heads": 2, "max_position_embeddings": LENGTH,
            "qk_channels": 16, "v_channels": 16,
        },
    ),
}  # fmt: skip
_ENCODER_DECODERS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "T5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "mT5": ("MT5ForConditionalGeneration", "MT5Config", _T5),
    "LongT5": ("LongT5ForConditionalGeneration", "LongT5Config", {**_T5, "local_radius": 3}),
    "BART": ("BartForConditionalGeneration", "BartConfig", _BART),
    "mBART": ("MBartForConditionalGeneration", "MBartConfig", _BART),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _BART),
    "Marian": ("MarianMTModel", "MarianConfig", {**_BART, "decoder_vocab_size": WORDS}),
    "M2M-100": ("M2M100ForConditionalGeneration", "M2M100Config", _BART),
    "Blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", _BART),
}
_IMAGES: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "ViT": ("ViTForImageClassification", "ViTConfig", _VIT),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", _VIT),
    "BEiT": ("BeitForImageClassification", "BeitConfig", {**_VIT, "use_relative_position_bias": True}),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", _VIT),
    "Swin": ("SwinForImageClassification", "SwinConfig", _SWIN),
    "Swin V2": ("Swinv2ForImageClassification", "Swinv2Config", _SWIN),
    "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig", {**_CONVOLUTIONS, "num_stages": 2}),
    "ConvNeXt V2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", {**_CONVOLUTIONS, "num_stages": 2}),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", {**_CONVOLUTIONS, "embedding_size": 4}),
    "PoolFormer": (
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
            "padding": [2, 1], "num_labels": CLASSES,
        },
    ),
}  # fmt: skip


def _others() -> dict[str, Callable[[], Architecture]]:
    """The architectures with inputs or losses of their own, and models with checkpointing of their own."""
    backbone: dict[str, Any] = {
        "embedding_size": 4,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "out_features": ["stage2"],
    }
    sizes = {
        key: value for key, value in _BART.items() if "forced" not in key and "start" not in key and "vocab" not in key
    }

    def detr() -> Architecture:
        settings = {
            **sizes, "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "num_queries": 3,
            "num_labels": CLASSES, "backbone_config": transformers.ResNetConfig(**backbone),
        }  # fmt: skip
        boxes = partial(torch.randint, 0, CLASSES, (ROWS, 3))
        return _architecture("DetrForObjectDetection", "DetrConfig", settings, partial(_image, 32), boxes, _of_boxes)

    whisper = {**_BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
    del whisper["forced_eos_token_id"]
    checkpointed: dict[str, Callable[[nn.Module], object]] = {
        "": lambda module: module.gradient_checkpointing_enable(),
        ", re-entrant": lambda module: module.gradient_checkpointing_enable({"use_reentrant": True}),
    }
    return {
        "CLIP": lambda: _architecture(
            "CLIPModel", "CLIPConfig", {**_TOWERS, "projection_dim": 8}, lambda: {**_text(), **_image(16)}, _classes, _of_pairs
        ),
        "SigLIP": lambda: _architecture(
            "SiglipModel", "SiglipConfig", _TOWERS, lambda: {**_text(), **_image(16)}, _classes, _of_pairs
        ),
        "DETR": detr,
        "Whisper": lambda: _architecture(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            whisper,
            lambda: {"input_features": torch.randn(ROWS, 8, 24), "decoder_input_ids": _words()},
            _words,
            of_words,
        ),
        "wav2vec2": lambda: _architecture(
            "Wav2Vec2ForCTC", "Wav2Vec2Config", _WAVES, lambda: {"input_values": torch.randn(ROWS, 128)}, _words, _of_frames
        ),
        "HuBERT": lambda: _architecture(
            "HubertForCTC", "HubertConfig", _WAVES, lambda: {"input_values": torch.randn(ROWS, 128)}, _words, _of_frames
        ),
        **{
            f"Llama, own checkpointing{kind}": partial(
                _architecture, "LlamaForCausalLM", "LlamaConfig", _GROUPED, _text, _words, of_words, change=change
            )
            for kind, change in checkpointed.items()
        },
        "ViT, own checkpointing": partial(
            _architecture, "ViTForImageClassification", "ViTConfig", _VIT, partial(_image, 32), _classes, of_classes,
            change=checkpointed[""],
        ),
    }  # fmt: skip


def _no_cache(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**settings, "use_cache": False}


ARCHITECTURES: dict[str, Callable[[], Architecture]] = {
    **{n: partial(_architecture, a, b, s, _text, _words, of_words) for n, (a, b, s) in _DECODERS.items()},
    **{
        n: partial(_architecture, a, b, s, _text, _words, of_words, single=True)
        for n, (a, b, s) in _EXPERT_MODELS.items()
    },
    **{
        n: partial(_architecture, a, b, _no_cache(s), lambda: {"input_ids": _words()}, _words, of_words)
        for n, (a, b, s) in _RECURRENT.items()
    },
    **{n: partial(_architecture, a, b, s, _text, _words, of_words) for n, (a, b, s) in _ENCODERS.items()},
    **{
        n: partial(_architecture, a, b, s, _pair_of_texts, _words, of_words)
        for n, (a, b, s) in _ENCODER_DECODERS.items()
    },
    **{
        n: partial(_architecture, a, b, s, partial(_image, 32), _classes, of_classes)
        for n, (a, b, s) in _IMAGES.items()
    },
    **_others(),
}
"""By name, each made anew at every call."""

RELATIVES = frozenset(
    ("GPT-Neo", "GPT-BigCode", "Gemma", "Gemma3", "Phi-3", "OLMo 2", "Granite", "StableLM", "StarCoder2", "Cohere", "MPT",
     "Qwen2-MoE", "DeBERTa-v2", "MPNet", "ConvBERT", "LongT5", "mBART", "Pegasus", "M2M-100", "Blenderbot", "DeiT", "BEiT",
     "DINOv2", "Swin V2", "ConvNeXt V2", "HuBERT", "SigLIP")
)  # fmt: skip
"""Architectures that differ little from another one, which the tests leave to `python -m benchmarks.models`."""
