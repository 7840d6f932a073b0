"""Models that bapipe knows by name, with their losses and data; importing this package loads no torch.

A model is a module here with a factory that returns an `Example` (see `example`): the module, example inputs, the loss
and the data. To add one, write such a module and add a line to `ZOO`. `transformer`, `position_ids`, `metrics` and
`checks` are shared by models; `hugging_face` builds those of transformers; `factory` calls a factory by its path;
`data` has the data sets.
"""

from bapipe.errors import InvalidModel, did_you_mean

ZOO: dict[str, str] = {
    "bert_base": "bapipe.zoo.bert:bert_base",
    "bert_large": "bapipe.zoo.bert:bert_large",
    "cosmoflow": "bapipe.zoo.cosmoflow:cosmoflow",
    "gnmt": "bapipe.zoo.gnmt:gnmt",
    "gnmt16": "bapipe.zoo.gnmt:gnmt16",
    "gnmt8": "bapipe.zoo.gnmt:gnmt8",
    "gpt2": "bapipe.zoo.gpt2:gpt2",
    "resnet50": "bapipe.zoo.resnet:resnet50",
    "two_tower": "bapipe.zoo.two_tower:two_tower",
    "unet": "bapipe.zoo.unet:unet",
    "unet3d": "bapipe.zoo.unet3d:unet3d",
    "vgg16": "bapipe.zoo.vgg:vgg16",
    "vgg16_bn": "bapipe.zoo.vgg:vgg16_bn",
}
"""The factory of each model, as `module.path:function`."""


HUGGING_FACE = "hf:"
"""Begins the name of a model of Hugging Face's transformers, as in hf:LlamaForCausalLM."""


def resolve(model: str) -> str:
    """Returns the factory of a model: that of a name in `ZOO`, or `model` itself if it is a `module.path:function`.

    That of `hf:CLASS` builds a class of transformers, see `bapipe.zoo.hugging_face`.

    Raises:
        InvalidModel: it is neither.
    """
    if model in ZOO:
        return ZOO[model]
    if model.startswith(HUGGING_FACE) and model.removeprefix(HUGGING_FACE).isidentifier():
        return f"bapipe.zoo.hugging_face:{model.removeprefix(HUGGING_FACE)}"
    if is_function_path(model):
        return model
    hint = did_you_mean(model.lower(), ZOO)
    raise InvalidModel(
        f"unknown model '{model}': want one of {', '.join(sorted(ZOO))}, or a factory of your own as "
        f"module.path:function{hint}"
    )


def is_function_path(text: str) -> bool:
    """Returns whether a text has the form `module.path:function`."""
    path, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in path.split("."))
