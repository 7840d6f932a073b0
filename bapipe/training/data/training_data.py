"""Opens the data that a run is to train on, and checks its items against the model's example inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, default_collate

from bapipe.errors import BapipeError
from bapipe.module_state.python_random import all_generators_restored, seed_cpu_generators
from bapipe.runtime.rng import derived_seed
from bapipe.torch_device import dtype_name
from bapipe.training.build import ModelBuild
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.data.dataset import PipelineDataset, item_parts
from bapipe.zoo.data.like_example import like_example
from bapipe.zoo.data.open_dataset import open_dataset
from bapipe.zoo.example import Example
from bapipe.zoo.factory import factory_name


def training_data(config: TrainConfig, build: ModelBuild, example: Example) -> PipelineDataset[Any]:
    """Returns the data that a configuration names; `example` is what `build` returns.

    A function that returns data is called under a seed of the run: it draws the same in all processes and when resumed.

    Raises:
        BapipeError: there is no such data, or its items are not like the example inputs.
    """

    def synthetic() -> Dataset[Any]:
        real = replace(build, without_values=False)() if build.without_values else example
        return like_example(real.module, real.tensors, real.target, real.inputs)

    with all_generators_restored():
        seed_cpu_generators(derived_seed(config.seed, "data"))  # another seed than the factory's
        dataset = open_dataset(
            config.data,
            example.data,
            factory_name(build.factory),
            buckets=config.buckets,
            augment=config.augment,
            skip_unreadable=config.skip_unreadable,
            synthetic=synthetic,
        )
    check_items(dataset, example.tensors, config.data)
    return dataset


def check_items(dataset: PipelineDataset[Any], inputs: Sequence[Tensor], data: str) -> None:
    """Raises BapipeError if the first item of some data is not like the example inputs of a model."""
    if len(dataset) == 0:
        return
    try:
        item = dataset[0]
        if isinstance(item, Mapping):
            raise BapipeError(
                f"data '{data}' has dictionaries as items: want (input, target), or ((input, ...), target) with the "
                "inputs in the order of the model's"
            )
        item = item_parts(item)
        parts = [default_collate([part]) for part in item]
    except BapipeError:
        raise
    except Exception as error:  # whatever the data set's own code raises
        raise BapipeError(
            f"data '{data}' fails at its first item: {type(error).__name__}: {error}; want (input, target) or "
            "((input, ...), target)"
        ) from error
    if len(parts) != len(inputs) + 1:
        raise BapipeError(
            f"data '{data}' has items of {len(parts) - 1} inputs and a target; the model takes {len(inputs)} inputs"
        )
    for index, (part, example) in enumerate(zip(parts, inputs, strict=False)):
        if not isinstance(part, Tensor):
            raise BapipeError(f"data '{data}' gives a {type(part).__name__} as input {index}; want a tensor or numbers")
        shape = example.shape[1:]
        if part.dtype != example.dtype or (part.shape[1:] != shape and not dataset.bucket_shapes):
            raise BapipeError(
                f"data '{data}' gives input {index} of shape {tuple(part.shape[1:])} and type "
                f"{dtype_name(part.dtype)}; the model's example has shape {tuple(shape)} and type "
                f"{dtype_name(example.dtype)}"
            )
