"""Opens the data set that a user names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.module_path import current_folder_importable
from bapipe.zoo import is_function_path
from bapipe.zoo.data.buckets import Bucketed
from bapipe.zoo.data.dataset import PipelineDataset, as_pipeline_dataset
from bapipe.zoo.data.like_example import like_example
from bapipe.zoo.data.translation import LOCALE, Translations
from bapipe.zoo.example import Example
from bapipe.zoo.factory import find, with_place

SYNTHETIC = "synthetic"
"""The name of made-up data, which every model has."""

Opener = Callable[[str], Dataset[Any]]


def open_dataset(
    spec: str,
    opener: Opener | None,
    factory: str,
    *,
    buckets: int,
    augment: bool,
    skip_unreadable: bool = False,
    synthetic: Callable[[], Dataset[Any]] | None = None,
) -> PipelineDataset[Any]:
    """Returns the data set that `spec` names, see `open_data`, in buckets of lengths and with random augmentation."""
    dataset = as_pipeline_dataset(open_data(spec, opener, factory, synthetic), f"data '{spec}'")
    return augmented(bucketed(without_unreadable(dataset, skip_unreadable, spec), buckets, spec), augment, spec)


def open_data(
    spec: str, opener: Opener | None, factory: str, synthetic: Callable[[], Dataset[Any]] | None = None
) -> Dataset[Any]:
    """Returns the data that `spec` names: what the function `module.path:function` returns, or what `opener` opens.

    `opener` is the `data` of the example that `factory` made. If it has none, or that knows no synthetic data, these
    are what `synthetic` returns.

    Raises:
        BapipeError: there is no such data, or its function fails.
    """
    if is_function_path(spec) and not spec.startswith(LOCALE) and not Path(spec).exists():
        return _called(spec)
    if opener is None:
        if spec == SYNTHETIC and synthetic is not None:
            return synthetic()
        raise BapipeError(
            f"'{factory}' has no data: give its Example a function named data, or name a function that returns the "
            "data, as `data` module.path:function"
        )
    try:
        return opener(spec)
    except (BapipeError, OSError):  # a function of a user's may take the name for a file's
        if spec != SYNTHETIC or synthetic is None:
            raise
        return synthetic()


def synthetic_data(example: Example, factory: str) -> PipelineDataset[Any] | None:
    """Returns the synthetic data of an example that `factory` made; None if its own function for data fails."""

    def like() -> PipelineDataset[Any]:
        return like_example(example.module, example.tensors, example.target, example.inputs)

    if example.data is None:
        return like()
    try:
        return as_pipeline_dataset(open_data(SYNTHETIC, example.data, factory, like))
    except Exception:  # whatever the function raises: a run with these data says so
        return None


def without_unreadable(data: PipelineDataset[Any], wanted: bool, spec: str) -> PipelineDataset[Any]:
    """Returns the data without files that cannot be read if `wanted`, else the data itself.

    Raises:
        BapipeError: the data is no folder of images, or none of them can be read.
    """
    if not wanted:
        return data
    readable = data.readable()
    if readable is None:
        raise BapipeError(f"data '{spec}' is no folder of images, so `skip_unreadable` has no file to leave out")
    return readable


def augmented(data: PipelineDataset[Any], wanted: bool, spec: str) -> PipelineDataset[Any]:
    """Returns the data with random crops of its images if `wanted`, else the data itself.

    Raises:
        BapipeError: the data is no folder of images.
    """
    if not wanted:
        return data
    crops = data.augmented()
    if crops is None:
        raise BapipeError(f"data '{spec}' is no folder of images, so `augment` cannot draw pieces of them")
    return crops


def bucketed(data: PipelineDataset[Any], num_buckets: int, spec: str) -> PipelineDataset[Any]:
    """Returns the data in buckets of several lengths; data of one length unchanged.

    Raises:
        BapipeError: the data has no lengths.
    """
    if num_buckets == 1:
        return data
    if not isinstance(data, Translations):
        raise BapipeError(f"data '{spec}' are no sentences, so they cannot be put into {num_buckets} buckets by length")
    return Bucketed(data, num_buckets)


def _called(spec: str) -> Dataset[Any]:
    with current_folder_importable():
        function = find(spec, "data")
        try:
            return function()  # type: ignore[return-value]
        except BapipeError:
            raise
        except Exception as error:  # any error in the function's code
            raise BapipeError(f"data '{spec}' failed: {with_place(error)}") from error
