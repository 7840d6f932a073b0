"""The entry points: profiles of a module, and of a model by its name, with a cache on disk."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, overload

import msgspec

from bapipe._optional import require_torch
from bapipe.device_types import type_of_kind
from bapipe.errors import BapipeError, RunFailed, root_cause
from bapipe.formats.cache import load_profile, profile_path, store_profile, store_unfinished_profile
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings
from bapipe.one_thread import one_thread_at_a_time
from bapipe.processes import check_not_imported
from bapipe.profiler.co_runners import co_runners
from bapipe.profiler.options import ProfileOptions
from bapipe.progress import PartsProgress
from bapipe.zoo import resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bapipe.equivalence.outcome import Loss
    from bapipe.tracing.bound_inputs import Inputs
    from bapipe.zoo.factory import Factory

_VERSION = 2
"""Of what profiles say: cached ones of version 1 lack buffers."""


@overload
def profile(
    module: "nn.Module",
    inputs: "Inputs",
    target: "Tensor",
    loss: "Loss",
    *,
    name: str | None = None,
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    device: "torch.device | str" = "cpu",
    kind: str | None = None,
    settings: Settings = Settings(),  # noqa: B008
    leaf_modules: Sequence[str] = (),
    operator_layers: bool = False,
    check: bool = True,
    progress: PartsProgress | None = None,
) -> ModelProfile: ...
@overload
def profile(
    module: "Factory",
    *,
    arguments: Mapping[str, object] | None = None,
    num_co_runners: int = 0,
    name: str | None = None,
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    device: "torch.device | str" = "cpu",
    kind: str | None = None,
    settings: Settings = Settings(),  # noqa: B008
    leaf_modules: Sequence[str] = (),
    operator_layers: bool = False,
    check: bool = True,
    progress: PartsProgress | None = None,
) -> ModelProfile: ...
@one_thread_at_a_time()
def profile(
    module: "nn.Module | Factory",
    inputs: "Inputs | None" = None,
    target: "Tensor | None" = None,
    loss: "Loss | None" = None,
    *,
    arguments: Mapping[str, object] | None = None,
    num_co_runners: int = 0,
    name: str | None = None,
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    device: "torch.device | str" = "cpu",
    kind: str | None = None,
    settings: Settings = Settings(),  # noqa: B008
    leaf_modules: Sequence[str] = (),
    operator_layers: bool = False,
    check: bool = True,
    progress: PartsProgress | None = None,
) -> ModelProfile:
    """Returns the profile of a module: times and bytes of its layers, measured while it trains on this machine.

    The module is left as it was, its gradients as None, and so is what the loss keeps.

    Args:
        module: or a factory, alone: a function that returns an `Example`, or a name as on the command line.
        inputs: examples of the inputs, by position or, as a mapping, by name: tensors, batch first, of any batch size;
            and constants that the forward takes, such as None or flags.
        target: an example target of the same batch size.
        loss: (output, target) -> mean loss over the batch.
        name: the model's name in the profile; None for the name of its class.
        microbatch_sizes: numbers of samples to measure at.
        device: `cpu`, or a GPU such as `cuda` or `cuda:1`.
        kind: of the device, to which clusters refer: `cpu` or `cuda` as it is one, or, for one of several kinds, with a
            hyphen and a name, such as `cuda-rtx3090`. None for the former.
        settings: how the model is computed; their `dtype` is replaced by the module's.
        leaf_modules: paths of modules of which each call is one layer; `*` matches any part of a path.
        operator_layers: makes each operator outside modules a layer.
        check: compares loss, gradients and changed buffers of the split model with the module's own, on a few samples.
        arguments: of a factory.
        num_co_runners: with a factory, the number of other processes that train the model meanwhile.
        progress: called with the parts that are done, the number of all, and the name of the next one.

    Raises:
        InvalidModel: the module cannot be traced, its stages would not train as it does, or a layer fails.
    """
    check_not_imported()
    require_torch()
    from torch import nn

    from bapipe.profiler.measure import measure_model
    from bapipe.torch_device import local_device
    from bapipe.zoo.data.open_dataset import synthetic_data
    from bapipe.zoo.example import Example

    options = ProfileOptions(
        microbatch_sizes=microbatch_sizes,
        settings=settings,
        leaf_modules=leaf_modules,
        operator_layers=operator_layers,
        check=check,
    )
    if not isinstance(module, nn.Module):
        if not (inputs is None and target is None and loss is None):
            raise BapipeError("a factory gives its own `inputs`, `target` and `loss`: leave them out, or give a module")
        made = profile_model(
            module,
            arguments or {},
            options,
            device=device,
            kind=kind,
            num_co_runners=num_co_runners,
            progress=progress,
        )
        return made if name is None else msgspec.structs.replace(made, model=name)
    if inputs is None or target is None or loss is None:
        raise BapipeError("a module is profiled with example `inputs`, a `target` and its `loss`; a factory gives them")
    if arguments or num_co_runners:
        raise BapipeError("`arguments` and `num_co_runners` are for a factory, which makes the module anew")
    examples = Example(module=module, inputs=inputs, target=target, loss=loss)
    name = name or type(module).__name__
    on = local_device(device)
    _check_kind(kind, on.type)
    data = partial(synthetic_data, examples, name)
    made = measure_model(module, inputs, target, loss, options, name=name, device=on, data=data, progress=progress)
    return _of_kind(made, kind)


@one_thread_at_a_time()
def profile_model(
    model: "Factory",
    arguments: Mapping[str, object],
    options: ProfileOptions,
    *,
    device: "torch.device | str" = "cpu",
    kind: str | None = None,
    num_co_runners: int = 0,
    write: Callable[[ModelProfile], None] | None = None,
    progress: PartsProgress | None = None,
) -> ModelProfile:
    """Returns the profile of a model: named in the zoo, by its factory's name `module.path:function`, or the factory.

    The measurements of finished sizes are stored until all sizes are done and the profile is written, so a second call
    continues after an interruption; unless only this process knows the factory, as one of a script or a notebook.

    Args:
        num_co_runners: number of other processes that train the model meanwhile. Ranks on the cores of one machine
            share its memory bandwidth, so each computes more slowly than one alone, and the profile should show it.
        write: called with the profile, to write it to a file.

    Raises:
        BapipeError: as `profile` or `write`; `RunFailed` if some sizes are finished: the message says which are stored.
        KeyboardInterrupt: on Ctrl-C, which says the same.
    """
    require_torch()
    from bapipe.profiler.measure import measure_model
    from bapipe.torch_device import local_device
    from bapipe.zoo.data.open_dataset import synthetic_data
    from bapipe.zoo.factory import build, factory_name, importable_name

    sizes, on = options.microbatch_sizes, local_device(device)
    _check_kind(kind, on.type)
    factory: Factory = resolve(model) if isinstance(model, str) else model
    importable = importable_name(factory)
    example = build(factory, arguments)
    key = None if importable is None else _cache_key(importable, arguments, device, options.settings)
    layer_choice = {
        "layer_by_layer": options.layer_by_layer,
        "exhaustive": options.exhaustive,
        "leaf_modules": list(options.leaf_modules),
        "operator_layers": options.operator_layers,
    }
    kept = {"unfinished": True, "co_runners": num_co_runners} | layer_choice
    unfinished_path = None if key is None else profile_path(key | kept)
    try:
        with co_runners(num_co_runners, factory, arguments, sizes[len(sizes) // 2]) as check_co_runners:
            measured = measure_model(
                example.module,
                example.inputs,
                example.target,
                example.loss,
                options,
                name=factory_name(model).rpartition(":")[2].rpartition(".")[2],
                device=on,
                factory=importable,
                arguments=arguments,
                data=partial(synthetic_data, example, factory_name(model)),
                resume_from=None if unfinished_path is None else load_profile(unfinished_path),
                save=_saved_to(unfinished_path, check_co_runners),
                progress=progress,
            )
        measured = _of_kind(measured, kind)
        if num_co_runners:
            environment = {**measured.environment, "co_runners": num_co_runners}
            measured = msgspec.structs.replace(measured, environment=environment)
        if write is not None:
            write(measured)
    except (BapipeError, KeyboardInterrupt) as error:
        unfinished = None if unfinished_path is None else load_profile(unfinished_path)
        if unfinished is None:
            raise
        advice = _what_is_kept(unfinished, sizes, error)
        if isinstance(error, KeyboardInterrupt):  # callers that go on after errors are to end all the same
            raise KeyboardInterrupt(advice) from error
        raise RunFailed(f"{error}; {advice}") from error
    if unfinished_path is not None:
        with suppress(OSError):  # it may not be there, nor its folder
            unfinished_path.unlink()
    return measured


def _check_kind(kind: str | None, device_type: str) -> None:
    """Raises BapipeError unless devices of a kind are of a type; None is of any."""
    if kind is not None and type_of_kind(kind) != device_type:
        raise BapipeError(
            f"`kind` is {shortened(kind)}: want '{device_type}', as the device is one, or a name that begins with "
            f"'{device_type}-'"
        )


def _of_kind(profile: ModelProfile, kind: str | None) -> ModelProfile:
    """Returns a profile with its device of another kind; as it is for None."""
    if kind is None:
        return profile
    return msgspec.structs.replace(profile, device=msgspec.structs.replace(profile.device, kind=kind))


def _saved_to(path: Path | None, check: Callable[[], None]) -> Callable[[ModelProfile], None]:
    """Returns a function that stores an unfinished profile, until that fails once; nothing if `check` raises."""
    is_stored = path is not None

    def save(profile: ModelProfile) -> None:
        nonlocal is_stored
        check()
        is_stored = is_stored and path is not None and store_unfinished_profile(path, profile)

    return save


def _what_is_kept(unfinished: ModelProfile, sizes: Sequence[int], error: BaseException) -> str:
    """Returns which measurements are stored, and how to get a profile of them."""
    from bapipe.torch_device import is_out_of_memory

    measured = unfinished.microbatch_sizes
    kept = f"the measurements at micro-batch size {', '.join(map(str, measured))} are stored"
    if not is_out_of_memory(root_cause(error)):
        return f"{kept}, and the same command continues from there"
    failed = min(size for size in sizes if size not in measured)
    needed, there = needed_bytes(unfinished, failed) / 2**20, unfinished.device.memory_bytes / 2**20
    return (
        f"size {failed} is expected to take {needed:,.0f} of {there:,.0f} MiB; {kept}: with `microbatch_sizes` "
        f"{','.join(map(str, measured))} the same command makes a profile of them"
    )


def needed_bytes(measured: ModelProfile, microbatch_size: int) -> int:
    """Returns about how much memory one micro-batch of the whole model takes, in proportion to the nearest one."""
    nearest = min(measured.microbatch_sizes, key=lambda size: abs(size - microbatch_size))
    layers = measured.at(nearest)
    each = sum(m.stash_bytes for m in layers) + max(m.workspace_bytes for m in layers)
    return sum(x.param_bytes + x.gradient_bytes for x in measured.layers) + each * microbatch_size // nearest


def profile_model_cached(
    model: str,
    arguments: Mapping[str, object],
    *,
    device: "torch.device | str" = "cpu",
    microbatch_sizes: Sequence[int],
    settings: Settings = Settings(),  # noqa: B008
    progress: PartsProgress | None = None,
) -> ModelProfile:
    """Returns the profile of a named model from the cache of this machine, or measures and stores it.

    A profile from before the last change of the factory's file is not used; changes of imported files are not noticed.
    """
    factory = resolve(model)
    require_torch()
    path = profile_path(_cache_key(factory, arguments, device, settings) | {"sizes": list(microbatch_sizes)})
    cached = load_profile(path)
    if cached is None:
        options = ProfileOptions(microbatch_sizes=microbatch_sizes, settings=settings)
        cached = profile_model(model, arguments, options, device=device, progress=progress)
        store_profile(path, cached)
    return cached


def _cache_key(
    factory: str, arguments: Mapping[str, object], device: "torch.device | str", settings: Settings
) -> dict[str, object]:
    """Returns the key of a cached profile: everything that it depends on."""
    require_torch()
    from bapipe.torch_device import describe, environment, local_device
    from bapipe.zoo.factory import package_versions, source_digest

    local = local_device(device)
    return {
        "version": _VERSION,
        "factory": factory,
        "arguments": dict(arguments),
        "device": describe(local).name,
        "environment": environment(local),
        "settings": msgspec.to_builtins(settings),
        "source": source_digest(factory),
    } | package_versions(factory)
