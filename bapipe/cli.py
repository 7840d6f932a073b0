"""The command line: one handler a command; the only place that prints and picks exit codes."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bapipe import api, report
from bapipe.changes import change_parts
from bapipe.cluster import Cluster
from bapipe.codec import check_writable, fingerprint, read, read_any, write, write_bytes
from bapipe.errors import BapipeError, Infeasible, RunFailed
from bapipe.host import num_cores
from bapipe.importers import STATE_OF, Origin, read_foreign
from bapipe.outcome import StepReport, TrainResult
from bapipe.page import page, profile_page
from bapipe.plan import Plan
from bapipe.profile import ModelProfile
from bapipe.recorded import read_trace
from bapipe.schedules import ALL
from bapipe.search.options import Options
from bapipe.settings import Settings
from bapipe.zoo import ZOO, resolve

if TYPE_CHECKING:
    from bapipe.search.pareto import Point

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # formatting help with rich would double its time
    help="Decides, proves and runs the best way to train a network as a pipeline over several devices.",
)
_columns = os.environ.get("COLUMNS", "")
_width = int(_columns) if _columns.isdigit() and int(_columns) >= 40 else None
out = Console(width=_width or (None if sys.stdout.isatty() else 120))
err = Console(stderr=True)

Output = Annotated[Path, typer.Option("-o", "--output", help="File to write.", dir_okay=False)]
Devices = Annotated[int | None, typer.Option("--devices", min=1, help="Number of devices, all alike, on this machine.")]
Kind = Annotated[str, typer.Option("--device", help="Kind of device: cpu or cuda.")]
Arguments = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="KEY=VALUE", help="Argument of the model's factory; may be repeated."),
]
Minibatch = Annotated[int, typer.Option("--minibatch-size", min=1, help="Samples in one optimizer step.")]
Sizes = Annotated[str, typer.Option("--microbatch-size", help="Micro-batch sizes to measure, such as 1,2,4,8.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


class Objective(StrEnum):
    """What a plan is to be best at."""

    STEP = "step"
    THROUGHPUT = "throughput"


def main() -> None:
    """Runs the command line; a BapipeError ends it with one line and exit code 1, or 3 where nothing fits."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        app()
    except BapipeError as error:
        text = " ".join(str(error).splitlines())
        if not (isinstance(error, RunFailed) and error.told):
            err.print(f"error: {text}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(3 if isinstance(error, Infeasible) else 1)


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help=f"{', '.join(sorted(ZOO))}, or a factory module.path:function.")],
    device: Kind = "cpu",
    microbatch_size: Sizes = "1,2,4,8",
    arg: Arguments = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, sgd-momentum, adam or adamw.")] = "sgd-momentum",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Compute threads on a CPU.")] = 1,
    autocast: Annotated[
        str | None, typer.Option("--autocast", help="Compute in bfloat16 or float16 by torch.autocast.")
    ] = None,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Lay images out pixel by pixel.")] = False,
    tf32: Annotated[bool, typer.Option("--tf32", help="Let CUDA round float32 factors to tf32.")] = False,
    layer_by_layer: Annotated[
        bool, typer.Option("--layer-by-layer", help="Hold one layer at a time, and measure equal ones once.")
    ] = False,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Layer by layer, measure equal ones too.")] = False,
    whole: Annotated[
        list[str] | None,
        typer.Option("--whole", metavar="PATH", help="Take a module as one layer, such as 'encoder.*'; repeatable."),
    ] = None,
    fine: Annotated[bool, typer.Option("--fine", help="Make operators between modules layers of their own.")] = False,
    output: Output = Path("profile.json"),
) -> None:
    """Measure each layer of a model: times of F, I and W, and bytes."""
    sizes = _integers(microbatch_size)
    check_writable(output)
    if autocast not in (None, "bfloat16", "float16"):
        raise BapipeError(f"--autocast {autocast}: want bfloat16 or float16")
    settings = Settings(
        optimizer=optimizer,
        threads=threads,
        autocast=cast(Literal["bfloat16", "float16"] | None, autocast),
        channels_last=channels_last,
        tf32=tf32,
    )
    if exhaustive and not layer_by_layer:
        raise BapipeError("--exhaustive goes with --layer-by-layer; else every layer is measured as it is")
    with _parts() as tell:
        measured = api.profile_model(
            model,
            _arguments(arg),
            device=device,
            microbatch_sizes=sizes,
            settings=settings,
            layer_by_layer=layer_by_layer,
            exhaustive=exhaustive,
            whole=whole or (),
            fine=fine,
            progress=tell,
        )
    write(output, measured)
    _print(report.profile_parts(measured))
    out.print(f"wrote {output}", highlight=False)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="PipeDream's graph.txt, or a table with a row for each layer.")],
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples in the pass that was measured.")],
    microbatch_size: Annotated[
        str | None,
        typer.Option("--microbatch-size", help="Sizes to hold, scaled in proportion; else the measured one."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name of the model; else the file's.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="Where the figures are from; else the file.")] = None,
    device: Annotated[str, typer.Option("--device", help="Kind of device that was measured.")] = "cuda",
    device_name: Annotated[str, typer.Option("--device-name", help="Its name.")] = "V100",
    memory_bytes: Annotated[int, typer.Option("--memory-bytes", min=0, help="Its memory.")] = 16 * 2**30,
    optimizer: Annotated[str, typer.Option("--optimizer", help=f"One of {', '.join(STATE_OF)}.")] = "sgd-momentum",
    output: Output = Path("profile.json"),
) -> None:
    """Turn a profile that others measured into one to plan with: PipeDream's graph.txt, or a table of layers."""
    check_writable(output)
    origin = Origin(
        model=model or (file.parent.name if file.name == "graph.txt" else file.stem),
        source=source or file.name,
        kind=device,
        device_name=device_name,
        memory_bytes=memory_bytes,
        batch_size=batch_size,
        sizes=_integers(microbatch_size) if microbatch_size else (batch_size,),
        optimizer=optimizer,
    )
    imported = read_foreign(file, origin)
    write(output, imported)
    _print(report.profile_parts(imported))
    out.print(f"wrote {output}", highlight=False)


@app.command()
def cluster(
    device: Kind = "cpu",
    devices: Devices = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure each way between every two devices; under torchrun, of the job.")
    ] = False,
    output: Output = Path("cluster.json"),
) -> None:
    """List this machine's devices, or a job's, and measure the links between them."""
    check_writable(output)
    if probe:
        with _parts("probing") as tell:
            found = api.probed_cluster(devices, device, tell)
        if os.environ.get("RANK", "0") != "0":  # of a torchrun job: rank 0 reports
            return
    else:
        with err.status("measuring the link between two ranks"):
            found = api.local_cluster(devices, device)
    write(output, found)
    _print(report.cluster_parts(found))
    out.print(f"wrote {output}", highlight=False)


@app.command()
def plan(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="PROFILE...|MODEL", help="Profiles, one a device kind, or a model to profile."),
    ],
    cluster: Annotated[Path | None, typer.Option("--cluster", help="Cluster file; else this machine.")] = None,
    devices: Devices = None,
    minibatch_size: Minibatch = 32,
    microbatch_size: Annotated[
        int | None, typer.Option("--microbatch-size", min=1, help="Fix the micro-batch size.")
    ] = None,
    schedule: Annotated[str, typer.Option("--schedule", help=f"From: {', '.join(ALL)}; search looks for an order.")] = (
        "1f1b,gpipe"
    ),
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="Fix the number of stages.")] = None,
    memory_limit: Annotated[
        int | None, typer.Option("--memory-limit", min=1, help="Bytes a device may hold at most.")
    ] = None,
    objective: Annotated[
        Objective, typer.Option("--objective", help="The time of one step, or the work of the most loaded device.")
    ] = Objective.STEP,
    memory_margin: Annotated[
        float, typer.Option("--memory-margin", min=0.0, max=0.99, help="Share of each device's memory to leave free.")
    ] = 0.0,
    replicas: Annotated[bool, typer.Option("--replicas/--no-replicas", help="Let stages have several devices.")] = True,
    recompute: Annotated[
        bool, typer.Option("--recompute/--no-recompute", help="Let stages that do not fit recompute.")
    ] = True,
    constraint: Annotated[
        list[str] | None,
        typer.Option("--constraint", help="'LAYER with|without LAYER' or 'LAYER on DEVICE,DEVICE'; may be repeated."),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", min=0.0, help="Seconds to search; else as long as takes some.")
    ] = None,
    pin: Annotated[
        Path | None, typer.Option("--pin", help="Judge this plan, made by hand, and bound it by all other plans.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what limits the plan, and what would help.")] = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Also list the front of step time, peak memory and number of devices.")
    ] = False,
    as_json: AsJson = False,
    arg: Arguments = None,
    output: Output = Path("plan.json"),
) -> None:
    """Find the fastest plan and prove how good it is."""
    if cluster is not None and devices is not None:
        raise BapipeError("--cluster and --devices both say what the devices are; give one of them")
    if pin is not None and (cluster is not None or devices is not None):
        raise BapipeError("a pinned plan holds its cluster: leave --cluster and --devices out")
    if objective is not Objective.STEP and (pin is not None or explain or pareto):
        raise BapipeError("--pin, --explain and --pareto are for --objective step: leave them or --objective out")
    check_writable(output)
    profiles = _profiles(sources, arg)
    pinned = read(pin, Plan) if pin is not None else None
    if pinned is not None:
        where = pinned.cluster
    else:
        where = read(cluster, Cluster) if cluster is not None else _this_machine(profiles, devices)
    options = Options(
        minibatch_size=minibatch_size if pinned is None else pinned.minibatch_size,
        microbatch_size=microbatch_size,
        schedules=[name.strip() for name in schedule.split(",")],
        num_stages=stages,
        memory_limit_bytes=memory_limit,
        memory_margin=memory_margin,
        replicas=replicas,
        recompute=recompute,
        constraints=constraint or (),
    )
    with _planning() as progress:
        if pinned is not None:
            decided = api.certify(pinned, profiles, options, time_limit_s=time_limit, progress=progress)
        else:
            decided = api.kept_plan(
                profiles, where, options, objective=objective.value, time_limit_s=time_limit, progress=progress
            )
    write(output, decided)
    words: tuple[str, ...] = ()
    if explain:
        with err.status("planning again with 10 % more memory"):
            words = api.explain(decided, profiles, options, time_limit_s=time_limit)
    front = _pareto(profiles, where, options) if pareto else ()
    if as_json:
        sys.stdout.write(json.dumps(report.plan_json(decided, words, front)) + "\n")
        return
    timeline = api.simulate(decided, profiles)
    _print(report.plan_parts(decided, timeline))
    out.print(report.gantt(timeline, out.width), highlight=False, no_wrap=True)
    for sentence in words:
        out.print(sentence, highlight=False, markup=False)
    if front:
        _print([report.pareto_table(front)])
    out.print(f"wrote {output}", highlight=False)


@app.command()
def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    profiles: Annotated[list[Path], typer.Argument(help="Profiles, one a device kind.")],
    as_json: AsJson = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the timeline as a Chrome trace.")] = None,
) -> None:
    """Predict one step of a plan: its timeline, its memory."""
    given = read(plan, Plan)
    known = api.by_kind([read(path, ModelProfile) for path in profiles])
    timeline = api.simulate(given, known)
    for kind, found in known.items():
        if given.profiles.get(kind) not in (None, fingerprint(found)):
            _note(f"the plan was made from another {kind} profile of {given.model}")
    prediction = timeline.prediction(given.minibatch_size)
    if trace is not None:
        write_bytes(trace, report.trace([("predicted", timeline)]))
    if as_json:
        sys.stdout.write(msgspec.json.encode(prediction).decode() + "\n")
        return
    _print(report.plan_parts(msgspec.structs.replace(given, prediction=prediction), timeline))
    out.print(report.gantt(timeline, out.width), highlight=False, no_wrap=True)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="Profile, cluster or plan file.")],
    other: Annotated[Path | None, typer.Argument(help="A second profile, to see what changed.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a plan or a profile as an HTML page.")] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="With a plan: draw a trace of simulate or run; may be repeated."),
    ] = None,
) -> None:
    """Draw a file: a profile's layers, a cluster's links, a plan's stages and order; or what two profiles differ in."""
    if other is not None:
        if html is not None or trace:
            raise BapipeError("--html and --trace go with a plan, not with two profiles")
        _print(change_parts(read(file, ModelProfile), read(other, ModelProfile)))
        return
    found = read_any(file)
    if not isinstance(found, Plan) and trace:
        raise BapipeError(f"--trace goes with a plan; {file} is none")
    if html is not None:
        if isinstance(found, Cluster):
            raise BapipeError(f"--html goes with a plan or a profile; {file} is neither")
        check_writable(html)
    if isinstance(found, ModelProfile):
        _print(report.profile_parts(found))
        if html is not None:
            write_bytes(html, profile_page(found))
            out.print(f"wrote {html}", highlight=False)
    elif isinstance(found, Cluster):
        _print(report.cluster_parts(found))
    else:
        timelines = [named for path in trace or () for named in read_trace(path)]
        if not timelines:
            timelines = [
                ("order, not to scale (F, I and W take 1 ms, B 2 ms, transfers nothing)", api.unit_timeline(found))
            ]
        _print(report.plan_parts(found))
        for title, timeline in timelines:
            out.print(f"{title}:", highlight=False)
            out.print(report.gantt(timeline, out.width), highlight=False, no_wrap=True)
        if html is not None:
            write_bytes(html, page(found, timelines))
            out.print(f"wrote {html}", highlight=False)


@app.command()
def run(
    source: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="Plan file, or a model to profile and plan.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to train.")] = 20,
    data: Annotated[
        str, typer.Option("--data", help="What to train on: synthetic, or what the README lists for the model.")
    ] = "synthetic",
    learning_rate: Annotated[
        float | None, typer.Option("--lr", min=0.0, help="Learning rate; else the model's own.")
    ] = None,
    lr_schedule: Annotated[str, typer.Option("--lr-schedule", help="constant, linear or cosine.")] = "constant",
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps in which the learning rate grows.")] = 0,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="Class of torch.optim; else the one that was profiled.")
    ] = None,
    optimizer_arg: Annotated[
        list[str] | None,
        typer.Option("--optimizer-arg", metavar="KEY=VALUE", help="Argument of the optimizer; may be repeated."),
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option("--clip-norm", help="Most that the norm of all gradients together may be.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Folder for checkpoints.")] = None,
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", min=1, help="Steps between two checkpoints; the last step is one.")
    ] = 100,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many checkpoints stay.")] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds that a rank may wait for another before the run ends.")
    ] = 600.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights, the order of the data, and dropout.")] = 0,
    arg: Arguments = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the last step's measured timeline as a Chrome trace.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model exactly as its plan says, one process a device."""
    if trace is not None:
        check_writable(trace)
    if resume and checkpoint is None:
        raise BapipeError("--resume needs --checkpoint FOLDER, the one to go on from")
    decided = _plan_of(source, arg)
    result = _train(
        decided,
        steps,
        data=data,
        learning_rate=learning_rate,
        learning_rate_schedule=lr_schedule,
        warmup_steps=warmup,
        optimizer=optimizer,
        optimizer_arguments=_arguments(optimizer_arg, "--optimizer-arg", "weight_decay=0.01"),
        clip_norm=clip_norm,
        seed=seed,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        timeout_s=timeout,
    )
    if os.environ.get("RANK", "0") != "0":  # of a torchrun job: rank 0 reports
        return
    if trace is not None:
        write_bytes(trace, report.trace([("measured", result.timeline)]))
    if as_json:
        sys.stdout.write(json.dumps(report.outcome_json(decided, result)) + "\n")
        return
    _print(report.outcome_parts(decided, result))
    out.print(report.gantt(result.timeline, out.width), highlight=False, no_wrap=True)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of checkpoints, or one of them.")],
    output: Output = Path("model.safetensors"),
) -> None:
    """Write a trained model as safetensors, with the names of the original module."""
    check_writable(output)
    num_tensors = api.export(checkpoint, output)
    out.print(f"wrote {num_tensors} tensors to {output}", highlight=False)


def _print(parts: Iterable[Any]) -> None:
    for part in parts:
        out.print(part, "", highlight=False, sep="\n")


def _note(text: str) -> None:
    err.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def _integers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise BapipeError(f"'{text}' is no list of different positive integers such as 1,2,4,8")
    return values


def _arguments(pairs: list[str] | None, option: str = "--arg", such_as: str = "image_size=64") -> dict[str, object]:
    """KEY=VALUE pairs; a value that is JSON is read as such, anything else is text."""
    arguments: dict[str, object] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BapipeError(f"{option} {pair}: want KEY=VALUE, such as {such_as}")
        try:
            arguments[key] = json.loads(text)
        except json.JSONDecodeError:
            arguments[key] = text
    return arguments


def _is_file(source: str) -> bool:
    return source.endswith(".json") or Path(source).is_file()


@contextmanager
def _parts(doing: str = "profiling") -> Iterator[api.Tell]:
    """A bar for work in named parts."""
    columns = TextColumn(doing + " {task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


def _profiles(sources: list[str], pairs: list[str] | None) -> dict[str, ModelProfile]:
    if len(sources) == 1 and not _is_file(sources[0]):
        resolve(sources[0])
        with _parts() as tell:
            return api.by_kind(api.kept_profile(sources[0], _arguments(pairs), progress=tell))
    if pairs:
        raise BapipeError("--arg goes with a model; a profile holds its arguments already")
    return api.by_kind(read(Path(source), ModelProfile) for source in sources)


def _this_machine(profiles: dict[str, ModelProfile], num_devices: int | None) -> Cluster:
    """Devices like the profiled one: as many as asked for, or as this machine has cores."""
    if num_devices is None:
        if set(profiles) != {"cpu"}:
            raise BapipeError("say what the devices are: --devices N like the profiled one, or --cluster FILE")
        num_devices = num_cores()
    if num_devices > 1:
        rate, latency = api.ASSUMED_LINK.bytes_per_s / 1e9, api.ASSUMED_LINK.latency_ns / 1e3
        _note(f"no link was measured: assuming {rate:g} GB/s and {latency:g} us; `bapipe cluster` measures it")
    return api.alike(profiles, num_devices)


def _plan_of(source: str, pairs: list[str] | None) -> Plan:
    if _is_file(source):
        if pairs:
            raise BapipeError("--arg goes with a model; a plan holds its arguments already")
        return read(Path(source), Plan)
    profiles = _profiles([source], pairs)
    with err.status("measuring the link between two ranks"):
        where = api.local_cluster(None, next(iter(profiles)))
    with _planning() as progress:
        decided = api.kept_plan(profiles, where, Options(minibatch_size=32), progress=progress)
    _print(report.plan_parts(decided))
    return decided


@contextmanager
def _planning() -> Iterator[Callable[[int, int, int], None]]:
    """Shows how far a search is: as a status on a terminal, else as a line every two seconds."""
    spoke_s = time.monotonic()
    with err.status("planning") as status:

        def progress(judged: int, best_ns: int, bound_ns: int) -> None:
            nonlocal spoke_s
            gap = best_ns / bound_ns - 1 if bound_ns else 0.0
            text = f"planning: {judged} plans judged, best {report.ms(best_ns)}, gap at most {gap:.2%}"
            status.update(text)
            if not err.is_terminal and time.monotonic() - spoke_s > 2:
                spoke_s = time.monotonic()
                _note(text)

        yield progress


def _pareto(profiles: dict[str, ModelProfile], where: Cluster, options: Options) -> "tuple[Point, ...]":
    with err.status("looking for the front") as status:

        def tell(num_devices: int, limit_bytes: int) -> None:
            status.update(f"looking for the front: {num_devices} devices, {report.mib(limit_bytes)} each")

        return api.pareto(profiles, where, options, tell=tell)


def _time_left(step: int, steps: int, first: tuple[int, float], now_s: float) -> str:
    """Says how long the steps after `step` take at the pace since the first, where there is one."""
    if step == first[0] or step + 1 == steps:
        return ""
    left_s = (now_s - first[1]) / (step - first[0]) * (steps - step - 1)
    return f"  {timedelta(seconds=round(left_s))} left"


def _train(decided: Plan, steps: int, **options: Any) -> TrainResult:
    """Trains with a bar on a terminal, and with a line every two seconds elsewhere."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"starting {len(decided.stages)} stages", total=steps)
        spoke_s, first = 0.0, None

        def on_step(done: StepReport) -> None:
            nonlocal spoke_s, first
            rate, now_s = decided.minibatch_size * 1e9 / done.step_ns, time.monotonic()
            text = f"loss {done.loss:.4f}  {rate:.4g} samples/s  bubble {done.bubble:.0%}"
            first = first or (done.step, now_s)
            bar.update(task, completed=done.step + 1, description=text)
            if not err.is_terminal and (now_s - spoke_s > 2 or done.step + 1 == steps):
                spoke_s = now_s
                _note(f"step {done.step + 1}/{steps}  {text}{_time_left(done.step, steps, first, now_s)}")

        try:
            return api.run(decided, steps=steps, on_step=on_step, **options)
        except KeyboardInterrupt:
            bar.stop()
            _note("interrupted: all ranks have ended")
            raise typer.Exit(130) from None
