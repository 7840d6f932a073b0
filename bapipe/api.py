"""What users and the command line call: profile a model, plan it, judge the plan, run it."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from bapipe.cache import cached_plan, cached_profile, keep_plan, plan_path, profile_path
from bapipe.cluster import Bandwidth, Cluster, Device
from bapipe.codec import fingerprint, write
from bapipe.cost import Stage, StageCost
from bapipe.errors import BapipeError, RunFailed
from bapipe.outcome import StepReport, TrainResult
from bapipe.plan import Plan
from bapipe.profile import ModelProfile, common_settings
from bapipe.search.explore import explore
from bapipe.search.options import Options, Progress
from bapipe.settings import Settings, check_same
from bapipe.simulate import judge
from bapipe.simulate import simulate as simulate_by_kind
from bapipe.timeline import Timeline
from bapipe.training import MOMENTUM, Training
from bapipe.zoo import resolve

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bapipe.search.pareto import Point

Profiles = ModelProfile | Iterable[ModelProfile] | Mapping[str, ModelProfile]
"""One profile, several for different device kinds, or profiles by kind."""

Tell = Callable[[int, int, str], None]
"""(parts done, all parts, what comes next)"""

ASSUMED_LINK = Bandwidth(bytes_per_s=1_600_000_000, latency_ns=200_000)
"""About what gloo reaches over loopback at 1 to 10 MB on a small machine; for plans made where no link was measured."""


def profile(
    module: "nn.Module",
    inputs: "Sequence[Tensor]",
    target: "Tensor",
    loss: "Callable[[Tensor, Tensor], Tensor]",
    *,
    name: str | None = None,
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    device: str = "cpu",
    settings: Settings = Settings(),  # noqa: B008
    whole: Sequence[str] = (),
    fine: bool = False,
    progress: Tell | None = None,
) -> ModelProfile:
    """Returns the profile of a module: times and bytes of its layers, measured in training on a device of this machine.

    Args:
        inputs, target: examples, batch first, of any batch size.
        loss: (output, target) -> mean loss over the batch.
        name: what the profile calls the model; its class where None.
        settings: how it is computed; `dtype` is the module's own, whatever they say.
        whole: paths of modules of which each call is one layer; `*` stands for any part of a path.
        fine: operators outside modules are layers of their own.

    Raises:
        InvalidModel: the module cannot be traced, or a layer fails.
    """
    torch = _torch()
    from bapipe.measure.layers import measure

    return measure(
        module,
        inputs,
        target,
        loss,
        microbatch_sizes=microbatch_sizes,
        name=name or type(module).__name__,
        device=torch.device(device),
        settings=settings,
        whole=whole,
        fine=fine,
        progress=progress,
    )


def plan(
    profiles: Profiles,
    cluster: Cluster | int,
    *,
    minibatch_size: int,
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    num_stages: int | None = None,
    microbatch_size: int | None = None,
    memory_limit_bytes: int | None = None,
    objective: Literal["step", "throughput"] = "step",
    memory_margin: float = 0.0,
    replicas: bool = True,
    recompute: bool = True,
    constraints: Sequence[str] = (),
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Returns the fastest plan of the space its certificate names; see `bapipe.search.explore.explore`.

    Args:
        cluster: the devices, or a number of devices like the profile's with assumed links.
        objective: the time of one step; or throughput, the least work for the most loaded device once the pipeline is
            full, see `bapipe.search.throughput`: its order is always 1F1B, and it chooses the number of stages.
        time_limit_s: how long to search; what is then found depends on the machine. Else as long as takes some
            seconds, and the same input gives the same plan.

    The other arguments are those of `bapipe.search.options.Options`.
    """
    known = by_kind(profiles)
    where = alike(known, cluster) if isinstance(cluster, int) else cluster
    options = Options(
        minibatch_size=minibatch_size,
        schedules=schedules,
        num_stages=num_stages,
        microbatch_size=microbatch_size,
        memory_limit_bytes=memory_limit_bytes,
        memory_margin=memory_margin,
        replicas=replicas,
        recompute=recompute,
        constraints=constraints,
    )
    return decide(known, where, options, objective=objective, time_limit_s=time_limit_s, progress=progress)


def decide(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: Options,
    *,
    objective: Literal["step", "throughput"] = "step",
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Returns what `plan` does, of profiles by device kind and options."""
    search = _along_orders if objective == "step" else _for_throughput
    decided = search(profiles, cluster.one_at_a_time, options, stop=_deadline(time_limit_s), progress=progress)
    return msgspec.structs.replace(decided, settings=common_settings(profiles.values()))


def kept_plan(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: Options,
    *,
    objective: Literal["step", "throughput"] = "step",
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Returns the plan made of the same inputs before, or makes and keeps it; under a time limit always makes it."""
    key = {
        "profiles": {kind: fingerprint(profile) for kind, profile in profiles.items()},
        "cluster": msgspec.to_builtins(cluster),
        "options": {**asdict(options), "schedules": list(options.schedules), "constraints": list(options.constraints)},
        "objective": objective,
    }
    path = plan_path(key)
    found = cached_plan(path) if time_limit_s is None else None
    if found is None:
        found = decide(profiles, cluster, options, objective=objective, time_limit_s=time_limit_s, progress=progress)
        if time_limit_s is None:
            keep_plan(path, found)
    return found


def certify(
    pinned: Plan,
    profiles: Mapping[str, ModelProfile],
    options: Options,
    *,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Returns a plan made by hand with its prediction and a bound on all plans; see `bapipe.search.pinned`."""
    from bapipe.search.pinned import certify_pinned

    return certify_pinned(pinned, profiles, options, stop=_deadline(time_limit_s), progress=progress)


def explain(
    plan: Plan, profiles: Mapping[str, ModelProfile], options: Options, *, time_limit_s: float | None = None
) -> tuple[str, ...]:
    """Returns in words what limits a plan and what would help; see `bapipe.search.explain`."""
    from bapipe.search.explain import explain as in_words
    from bapipe.search.sensitivity import sensitivity

    effects = sensitivity(plan, profiles, options, stop=_deadline(time_limit_s))
    return in_words(plan, profiles, options, effects)


def pareto(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: Options,
    *,
    tell: Callable[[int, int], None] | None = None,
) -> "tuple[Point, ...]":
    """Returns the front of step time, peak memory and number of devices; see `bapipe.search.pareto`."""
    from bapipe.search.pareto import pareto as front

    return front(profiles, cluster.one_at_a_time, options, tell=tell)


def _along_orders(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: Options,
    *,
    stop: Callable[[], bool] | None,
    progress: Progress | None,
) -> Plan:
    """Plans for a step along the profile's order of the layers, and along others that a branching model may need."""

    def along(line: Mapping[str, ModelProfile]) -> Plan:
        return explore(line, cluster, options, stop=stop, progress=progress)

    if len(cluster.devices) == 1 or any(device.kind not in profiles for device in cluster.devices):
        return along(profiles)
    from bapipe.search.orders import best_of_orders

    return best_of_orders(profiles, cluster, options.limits(cluster), along)


def _for_throughput(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: Options,
    *,
    stop: Callable[[], bool] | None,
    progress: Progress | None,
) -> Plan:
    from bapipe.search.throughput import plan_throughput

    if "1f1b" not in options.schedules:
        raise BapipeError(f"--objective throughput runs 1f1b, not {', '.join(options.schedules)}: leave --schedule out")
    if options.num_stages is not None:
        raise BapipeError(f"--objective throughput chooses the stages: leave --stages {options.num_stages} out")
    given = {
        "--memory-margin": options.memory_margin,
        "--constraint": options.constraints,
        "--time-limit": stop,
        "--no-replicas": not options.replicas,
    }
    for name, value in given.items():
        if value:
            raise BapipeError(f"--objective throughput does not know {name}: leave it out, or use --objective step")
    looks = 0

    def tell(load_ns: float, bound_ns: float) -> None:
        nonlocal looks
        looks += 1
        if progress:
            progress(looks, int(load_ns), int(bound_ns))

    return plan_throughput(
        profiles,
        cluster,
        minibatch_size=options.minibatch_size,
        microbatch_size=options.microbatch_size,
        memory_limit_bytes=options.memory_limit_bytes,
        tell=tell,
    )


def _deadline(seconds: float | None) -> Callable[[], bool] | None:
    if seconds is None:
        return None
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def simulate(plan: Plan, profiles: Profiles) -> Timeline:
    """Returns the predicted timeline of one step of a plan; see `bapipe.simulate`."""
    return simulate_by_kind(plan, by_kind(profiles))


def run(
    plan: Plan,
    *,
    factory: str | None = None,
    arguments: Mapping[str, object] | None = None,
    data: str = "synthetic",
    steps: int = 20,
    learning_rate: float | None = None,
    optimizer: str | None = None,
    optimizer_arguments: Mapping[str, object] | None = None,
    learning_rate_schedule: str = "constant",
    warmup_steps: int = 0,
    clip_norm: float | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    resume: bool = False,
    timeout_s: float = 600.0,
    on_step: Callable[[StepReport], None] | None = None,
) -> TrainResult:
    """Trains a plan's model, one process a device, or as a part of a torchrun job.

    Args:
        factory: `module.path:function` that returns a `bapipe.Example`; the plan's own where None.
        arguments: what the factory is called with; the plan's own where None.
        steps: in all, those before the checkpoint that it goes on from included.
        learning_rate: the example's own where None.
        optimizer, optimizer_arguments: a class of `torch.optim`, and what it takes besides; SGD has momentum 0.9. The
            one that the plan's profile was measured with where None.
        learning_rate_schedule: constant, linear or cosine, after `warmup_steps` in which it grows.
        clip_norm: the most that the norm of all gradients together may be.
        checkpoint: a folder for checkpoints, one every `checkpoint_every` steps and one at the end; `keep` stay.
        resume: goes on from the newest one there, where there is one, whatever plan it was made under.
        timeout_s: how long a rank may wait for another before the run ends.
        data: what the example's `data` opens, such as mnist, synthetic, or a folder.
        on_step: called after every step; under torchrun in rank 0 only.

    Raises:
        BapipeError: the plan does not fit the model, the machine or the data.
        RunFailed: a rank died.
    """
    factory = factory or plan.factory
    if factory is None:
        raise BapipeError(
            f"the plan of {plan.model} names no factory, so there is nothing to build the model with: profile it as "
            "module.path:function, or use bapipe.Pipeline in a script of your own"
        )
    _torch()
    _check_devices(plan)
    planned = Settings() if plan.settings is msgspec.UNSET else plan.settings
    optimizer, optimizer_arguments = _optimizer(planned, optimizer, optimizer_arguments or {})
    from bapipe.runtime.checkpointing import Keeping
    from bapipe.runtime.train import train
    from bapipe.zoo.factory import build, current_folder_importable

    given = dict(plan.arguments if arguments is None else arguments)
    with current_folder_importable():
        example = build(factory, given, meta=True)
        if plan.settings is not msgspec.UNSET:
            check_same(planned, msgspec.structs.replace(planned, dtype=_dtype(example.module)))
        if example.data is None:
            raise BapipeError(f"'{factory}' says nothing of data: give its Example a `data` function")
        return train(
            plan,
            partial(build, factory, given, meta=True),
            example.data(data),
            Training(
                steps=steps,
                learning_rate=example.learning_rate if learning_rate is None else learning_rate,
                optimizer=optimizer,
                optimizer_arguments=optimizer_arguments,
                schedule=learning_rate_schedule,
                warmup_steps=warmup_steps,
                clip_norm=clip_norm,
                autocast=planned.autocast,
                seed=seed,
            ),
            keeping=Keeping(folder=checkpoint, every=checkpoint_every, keep=keep, resume=resume)
            if checkpoint is not None
            else None,
            timeout_s=timeout_s,
            on_step=on_step,
        )


def _optimizer(
    planned: Settings, name: str | None, arguments: Mapping[str, object]
) -> tuple[str, Mapping[str, object]]:
    """Returns the optimizer to train with; a profile measured with another, or settings not run, are refused.

    Optimizers that profiles do not know are not compared.
    """
    if name is None:
        name, own = _MEASURED.get(planned.optimizer, (planned.optimizer, {}))
        arguments = {**own, **arguments}
    measured = name.lower() if name.lower() in ("adam", "adamw") else planned.optimizer
    if name.lower() == "sgd":
        measured = "sgd-momentum" if arguments.get("momentum", 0 if arguments else MOMENTUM) else "sgd"
    check_same(planned, Settings(dtype=planned.dtype, optimizer=measured, autocast=planned.autocast))
    return name, arguments


_MEASURED: dict[str, tuple[str, Mapping[str, object]]] = {
    "sgd": ("sgd", {"momentum": 0}),
    "sgd-momentum": ("sgd", {"momentum": MOMENTUM}),
}
"""What stands for the optimizers of profiles that have another name in torch."""


def export(checkpoint: Path, output: Path) -> int:
    """Writes the model's tensors of a checkpoint, or of the newest in a folder, as safetensors; returns how many.

    They have the names of the original module's `state_dict()`.

    Raises:
        BapipeError: there is no checkpoint, it is damaged, or the file cannot be written.
    """
    _torch()
    from bapipe.runtime.export import export as write_state

    return write_state(checkpoint, output)


def by_kind(profiles: Profiles) -> dict[str, ModelProfile]:
    """Returns profiles by device kind.

    Raises:
        BapipeError: there is none, or two are of the same kind.
    """
    if isinstance(profiles, Mapping):
        return dict(profiles)
    given = [profiles] if isinstance(profiles, ModelProfile) else list(profiles)
    known: dict[str, ModelProfile] = {}
    for one in given:
        if one.device.kind in known:
            raise BapipeError(f"two profiles are of device kind '{one.device.kind}'; give one for each kind")
        known[one.device.kind] = one
    if not known:
        raise BapipeError("no profile given")
    return known


def alike(profiles: Mapping[str, ModelProfile], num_devices: int) -> Cluster:
    """Returns devices like the one profiled, all on one host, with `ASSUMED_LINK` between them.

    Ranks on a CPU share the machine's memory.
    """
    if len(profiles) > 1:
        raise BapipeError(
            f"profiles of several kinds ({', '.join(sorted(profiles))}) need a cluster file that says which device is "
            "of which kind"
        )
    device = next(iter(profiles.values())).device
    memory_bytes = device.memory_bytes // num_devices if device.kind == "cpu" else device.memory_bytes
    return Cluster(
        devices=tuple(
            Device(name=f"{device.kind}{i}", host="host0", kind=device.kind, memory_bytes=memory_bytes)
            for i in range(num_devices)
        ),
        intra_host=ASSUMED_LINK,
        inter_host=ASSUMED_LINK,
    )


def local_cluster(num_devices: int | None, kind: str) -> Cluster:
    """Returns this machine's devices of a kind, the link between them measured."""
    _torch()
    from bapipe.measure.cluster import cluster

    return cluster(num_devices, kind)


def probed_cluster(num_devices: int | None, kind: str, tell: Tell) -> Cluster:
    """Returns this machine's devices, or those of the torchrun job it is called in, each way between them measured.

    Raises:
        BapipeError: this machine lacks the devices, or a job was started and a number of devices asked for.
        RunFailed: the links cannot be measured.
    """
    _torch()
    from bapipe.measure.cluster import check_devices
    from bapipe.measure.probe import probe_here, probe_job

    if "RANK" not in os.environ:
        return probe_here(check_devices(num_devices, kind), kind)
    if num_devices is not None:
        raise BapipeError("--devices with torchrun: the job's ranks are the devices; leave it out")
    return probe_job(kind, tell)


def profile_model(
    model: str,
    arguments: Mapping[str, object],
    *,
    device: str = "cpu",
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    settings: Settings = Settings(),  # noqa: B008
    layer_by_layer: bool = False,
    exhaustive: bool = False,
    whole: Sequence[str] = (),
    fine: bool = False,
    progress: Tell | None = None,
) -> ModelProfile:
    """Returns the profile of a model named in the zoo or by its factory, `module.path:function`.

    Each size that was measured is kept until all are, so that what was interrupted goes on where it stopped.
    """
    factory = resolve(model)
    torch = _torch()
    from bapipe.measure.layers import measure
    from bapipe.zoo.factory import build

    example = build(factory, arguments)
    key = _key(factory, arguments, device, settings)
    way = {"alone": layer_by_layer, "exhaustive": exhaustive, "whole": list(whole), "fine": fine}
    part = profile_path(key | {"unfinished": True} | way)
    try:
        measured = measure(
            example.module,
            example.inputs,
            example.target,
            example.loss,
            microbatch_sizes=microbatch_sizes,
            name=model.rpartition(":")[2],
            device=torch.device(device),
            factory=factory,
            arguments=arguments,
            settings=settings,
            layer_by_layer=layer_by_layer,
            exhaustive=exhaustive,
            whole=whole,
            fine=fine,
            so_far=cached_profile(part),
            keep=partial(write, part),
            progress=progress,
        )
    except (BapipeError, KeyboardInterrupt) as error:
        kept = cached_profile(part)
        if kept is None:
            raise
        sizes = ", ".join(map(str, kept.microbatch_sizes))
        raise RunFailed(
            f"{str(error) or 'interrupted'}; what was measured at micro-batch size {sizes} is kept, and the same "
            "command goes on from there"
        ) from error
    part.unlink(missing_ok=True)
    return measured


def kept_profile(
    model: str,
    arguments: Mapping[str, object],
    *,
    device: str = "cpu",
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    settings: Settings = Settings(),  # noqa: B008
    progress: Tell | None = None,
) -> ModelProfile:
    """Returns the profile of a named model that was measured on this machine before, or measures and keeps it.

    One measured before the factory's file was changed does not count; files that it imports are not looked at.
    """
    factory = resolve(model)
    _torch()
    path = profile_path(_key(factory, arguments, device, settings) | {"sizes": list(microbatch_sizes)})
    found = cached_profile(path)
    if found is None:
        found = profile_model(
            model, arguments, device=device, microbatch_sizes=microbatch_sizes, settings=settings, progress=progress
        )
        write(path, found)
    return found


def _key(factory: str, arguments: Mapping[str, object], device: str, settings: Settings) -> dict[str, object]:
    """What a kept profile depends on."""
    torch = _torch()
    from bapipe.machine import describe, environment
    from bapipe.zoo.factory import source_digest

    return {
        "factory": factory,
        "arguments": dict(arguments),
        "device": describe(torch.device(device)).name,
        "environment": environment(),
        "settings": msgspec.to_builtins(settings),
        "source": source_digest(factory),
    }


def unit_timeline(plan: Plan) -> Timeline:
    """Returns the plan's order with F, I and W of a millisecond each and no transfers, to draw what the order is."""
    unit = StageCost(forward_ns=10**6, input_grad_ns=10**6, weight_grad_ns=10**6)
    return judge(plan.table, [Stage(on=(unit,) * len(stage.devices)) for stage in plan.stages], plan.cluster)


def _torch() -> Any:
    """Returns torch, which planning does without."""
    try:
        import torch
    except ImportError as error:
        raise BapipeError(f"profiling and running need torch ({error}): pip install 'bapipe[run]'") from None
    return torch


def _dtype(module: "nn.Module") -> str:
    """Returns the type of a module's parameters, as profiles write it."""
    return str(next(module.parameters()).dtype).removeprefix("torch.")


def _check_devices(plan: Plan) -> None:
    """Refuses a plan for more devices than there are here; a torchrun job counts its own."""
    if "RANK" in os.environ:
        return
    from bapipe.machine import num_devices

    used = {name for stage in plan.stages for name in stage.devices}
    kinds = {device.kind for device in plan.cluster.devices if device.name in used}
    for kind in sorted(kinds):
        have = num_devices(kind)
        if len(used) > have:
            raise BapipeError(
                f"the plan uses {len(used)} {kind} devices and this machine has {have}: plan with --devices {have}, "
                "or start it on more machines with torchrun"
            )
