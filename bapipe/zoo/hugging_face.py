"""Models of Hugging Face's transformers, from the name of a class and settings of its config; nothing is downloaded.

Every class of the package that ends in one of `_HEADS` is a factory here: `hf:LlamaForCausalLM` on the command line is
`bapipe.zoo.hugging_face:LlamaForCausalLM`, which takes what `LlamaConfig` takes, and `length`, the words of a text.
What a config ignores, or uses only to generate texts, is refused: it would be a typing error, or do nothing.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bapipe.errors import InvalidModel, did_you_mean
from bapipe.zoo.checks import check_sizes
from bapipe.zoo.data.language_modeling import next_token_texts
from bapipe.zoo.example import Example

_BATCH_SIZE = 2
_LENGTH = 128


def __getattr__(name: str) -> Callable[..., Example]:
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(_model, name)


def _model(architecture: str, length: int | None = None, **settings: object) -> Example:
    """Returns a model with fresh weights; `settings` are those of its config.

    Raises:
        InvalidModel: transformers is missing, has no such class, its config has no such setting, or `length` is given
            for a model of images.
        ValueError: `length` or `num_labels` is no integer of at least 1.
    """
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError:
        raise InvalidModel(f"hf:{architecture} is a model of the package transformers: install it") from None
    head = next((head for head in _HEADS if architecture.endswith(head)), None)
    if head is None:
        raise InvalidModel(f"hf:{architecture}: want a class that ends in {', '.join(_HEADS)}")
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        hint = did_you_mean(architecture, dir(transformers))
        raise InvalidModel(f"transformers {transformers.__version__} has no class '{architecture}'{hint}")
    sizes = {"length": length, "num_labels": settings.get("num_labels")}
    check_sizes(**{name: size for name, size in sizes.items() if size is not None})
    config = _config(transformers, model_class.config_class, settings)
    inputs, target = _HEADS[head](config, length)
    return Example(
        module=model_class(config),
        inputs=inputs,
        target=target,
        loss=loss,
        data=_data(head, inputs, config),
    )


def _config(transformers: Any, config_class: Any, settings: Mapping[str, object]) -> Any:
    default = config_class()
    known = {*default.to_dict(), *default.attribute_map, "num_labels"}
    for name, value in settings.items():
        if name in known:
            continue
        # A config keeps what it does not know as an attribute of that name, and drops what is for generating texts.
        if name in vars(config_class(**{name: value})) or hasattr(transformers.GenerationConfig(), name):
            raise InvalidModel(f"{config_class.__name__} has no setting '{name}'{did_you_mean(name, known)}")
    cache = {"use_cache": False} if "use_cache" in known else {}  # a cache of keys and values serves generation only
    return config_class(**{**cache, **_marks(default.to_dict(), settings), **settings})


def _marks(default: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, int]:
    """Returns words for the marks, such as that of a text's end, whose own ones are not in the vocabulary."""
    num_words = settings.get("vocab_size", default.get("vocab_size"))
    if not isinstance(num_words, int):
        return {}
    ids = {name: value for name, value in default.items() if name.endswith("_token_id") and isinstance(value, int)}
    return {name: 0 for name, value in ids.items() if value >= num_words}


def loss(output: Any, target: Tensor) -> Tensor:
    """Returns the mean cross entropy: over the samples, or over all words of texts, which are equally long."""
    scores: Tensor = output["logits"]
    return functional.cross_entropy(scores.flatten(0, -2), target.flatten())


_Given = tuple[dict[str, Tensor], Tensor]
"""Example inputs by name, and an example target."""


def _words(config: Any, length: int | None) -> Tensor:
    if length is None:
        length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InvalidModel(
            f"{type(config).__name__} has no `vocab_size`, so no example inputs can be made: write a function that "
            "returns a bapipe.Example with your own"
        )
    return torch.randint(0, config.vocab_size, (_BATCH_SIZE, length))


def _word_each(config: Any, length: int | None) -> _Given:
    words = _words(config, length)
    return {"input_ids": words}, words


def _label_each(config: Any, length: int | None) -> _Given:
    words = _words(config, length)
    return {"input_ids": words}, words % config.num_labels


def _label_of_text(config: Any, length: int | None) -> _Given:
    return {"input_ids": _words(config, length)}, torch.arange(_BATCH_SIZE) % config.num_labels


def _label_of_image(config: Any, length: int | None) -> _Given:
    if length is not None:
        raise InvalidModel(f"length is {length}, and images have none: leave it out; some configs have an `image_size`")
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    images = torch.randn(_BATCH_SIZE, config.num_channels, height, width)
    return {"pixel_values": images}, torch.arange(_BATCH_SIZE) % config.num_labels


def _translation(config: Any, length: int | None) -> _Given:
    words = _words(config, length)
    return {"input_ids": words, "decoder_input_ids": words.flip(1)}, words


_HEADS: dict[str, Callable[[Any, int | None], _Given]] = {
    "ForCausalLM": _word_each,
    "LMHeadModel": _word_each,
    "ForMaskedLM": _word_each,
    "ForConditionalGeneration": _translation,
    "ForSequenceClassification": _label_of_text,
    "ForTokenClassification": _label_each,
    "ForImageClassification": _label_of_image,
}
"""What each kind of head is trained on."""


def _data(head: str, inputs: Mapping[str, Tensor], config: Any) -> Callable[[str], Any] | None:
    if head not in ("ForCausalLM", "LMHeadModel"):
        return None
    return partial(next_token_texts, vocabulary_size=config.vocab_size, length=inputs["input_ids"].shape[1])
