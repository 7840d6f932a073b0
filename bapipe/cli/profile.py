"""Commands that measure, or import what other tools measured: profile, import, cluster."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from bapipe import report
from bapipe.cli.options import MAX_THREADS, Arguments, AsJson, Kind, Output, Sizes, integers, key_values
from bapipe.cli.outputs import check_output, show_output, write_and_show, write_output
from bapipe.cli.progress import parts_bar, status
from bapipe.errors import BapipeError
from bapipe.formats.codec import read
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings
from bapipe.importers import NUM_OPTIMIZER_STATES, ImportMetadata, import_file, import_group
from bapipe.planner.inputs.clusters import local_cluster, probed_cluster
from bapipe.planner.inputs.link_catalogue import CATALOGUE, cluster_like
from bapipe.planner.inputs.validation import MAX_DEVICES
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.profile import profile_model
from bapipe.torchrun import is_first_rank
from bapipe.units import MAX_INT
from bapipe.zoo import ZOO


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(sorted(ZOO))}; a factory of your own, as module.path:function; or hf:CLASS, a "
            "model of transformers, with settings of its config as --arg."
        ),
    ],
    device: Kind = "cpu",
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            help="Kind of the device in the profile, to which a cluster's devices refer. One of several kinds of GPUs "
            "has a name behind a hyphen, such as cuda-rtx3090. Default: cpu or cuda.",
        ),
    ] = None,
    microbatch_size: Sizes = "1,2,4,8",
    arg: Arguments = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="Optimizer to measure: sgd, sgd-momentum, adam or adamw.")
    ] = "sgd-momentum",
    threads: Annotated[
        int, typer.Option("--threads", min=1, max=MAX_THREADS, help="Number of compute threads on a CPU.")
    ] = 1,
    autocast: Annotated[
        str | None, typer.Option("--autocast", help="Compute in bfloat16 or float16 with torch.autocast.")
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Store images in torch's channels-last memory format.")
    ] = False,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Let CUDA devices multiply float32 matrices in TF32 precision.")
    ] = False,
    layer_by_layer: Annotated[
        bool,
        typer.Option("--layer-by-layer", help="Load one layer at a time, for models that do not fit in memory."),
    ] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every layer, even if it equals one that has been measured.")
    ] = False,
    leaf_module: Annotated[
        list[str] | None,
        typer.Option(
            "--leaf-module",
            metavar="PATH",
            help="Treat each call of this module as one layer, such as 'encoder.*'. May be repeated.",
        ),
    ] = None,
    operator_layers: Annotated[
        bool, typer.Option("--operator-layers", help="Treat each operator between modules as a separate layer.")
    ] = False,
    co_runners: Annotated[
        int,
        typer.Option(
            "--co-runners",
            min=0,
            max=MAX_THREADS,
            help="Number of processes that train the model at the same time, like ranks on a CPU's other cores.",
        ),
    ] = 0,
    check: Annotated[
        bool,
        typer.Option(help="Compare loss, gradients and buffers of the split model with the original's, on 7 samples."),
    ] = True,
    as_json: AsJson = False,
    output: Output = Path("profile.json"),
) -> None:
    """Measure the time and memory of each layer of a model."""
    sizes = integers(microbatch_size)
    check_output(output)
    if autocast not in (None, "bfloat16", "float16"):
        raise BapipeError(f"--autocast {autocast}: want bfloat16 or float16")
    settings = Settings(
        optimizer=optimizer,
        threads=threads,
        autocast=cast(Literal["bfloat16", "float16"] | None, autocast),
        channels_last=channels_last,
        tf32=tf32,
    )
    options = ProfileOptions(
        microbatch_sizes=sizes,
        settings=settings,
        layer_by_layer=layer_by_layer,
        exhaustive=exhaustive,
        leaf_modules=leaf_module or (),
        operator_layers=operator_layers,
        check=check,
    )
    with ExitStack() as bar:

        def write(measured: ModelProfile) -> None:
            bar.close()  # it would be drawn into a profile that is written to the terminal
            write_output(output, measured)

        measured = profile_model(
            model,
            key_values(arg),
            options,
            device=device,
            kind=kind,
            num_co_runners=co_runners,
            write=write,
            progress=bar.enter_context(parts_bar()),
        )
    show_output(output, measured, report.render_profile, as_json=as_json)


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="PipeDream's graph.txt, ParaDL's or another table with a row per layer, or Sailor's profile.json."
        ),
    ],
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=1, max=MAX_INT, help="Number of samples in the measured pass; not with --layers."
        ),
    ] = None,
    microbatch_size: Annotated[
        str | None,
        typer.Option(
            "--microbatch-size",
            help="Micro-batch sizes of the profile, in samples. Default: the measured ones. Others than --batch-size "
            "are scaled in proportion; with --layers there are the measured ones only.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Name of the model. Default: the name of the file, or of graph.txt's folder."),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="Where the figures come from. Default: the name of the file.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Kind of the device that was measured.")] = "cuda",
    device_name: Annotated[str, typer.Option("--device-name", help="Name of that device.")] = "V100",
    memory_bytes: Annotated[
        int, typer.Option("--memory-bytes", min=0, max=MAX_INT, help="Memory of that device, in bytes.")
    ] = 16 * 2**30,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help=f"Optimizer whose state is counted: {', '.join(NUM_OPTIMIZER_STATES)}.")
    ] = "sgd-momentum",
    layers: Annotated[
        Path | None, typer.Option("--layers", help="Sailor's llm_info.json, for FILE from Sailor; --model selects.")
    ] = None,
    members: Annotated[
        int, typer.Option("--members", min=1, max=MAX_INT, help="Number of devices that share each layer.")
    ] = 1,
    as_json: AsJson = False,
    output: Output = Path("profile.json"),
) -> None:
    """Convert a profile that another tool measured.

    The file is PipeDream's graph.txt, ParaDL's table of a network, or a table with one row per layer. With --layers it
    is one of Sailor: its profile.json, or a folder with its tables for Metis.
    """
    check_output(output, file, *([layers] if layers else []))
    if batch_size is None and layers is None:
        raise BapipeError("want --batch-size (PipeDream's graph.txt or a table), or --layers (a profile of Sailor)")
    if batch_size is not None and layers is not None:
        raise BapipeError("--batch-size does not go with --layers: a profile of Sailor says its sizes; leave it out")
    if members > 1 and layers is None:
        raise BapipeError("--members is for a profile of Sailor: add --layers llm_info.json")
    origin = ImportMetadata(
        model=model or (file.name == "graph.txt" and file.parent.resolve().name) or file.stem,
        source=source or file.name,
        kind=device,
        device_name=device_name,
        memory_bytes=memory_bytes,
        batch_size=batch_size or 1,
        sizes=integers(microbatch_size) if microbatch_size else () if batch_size is None else (batch_size,),
        optimizer=optimizer,
    )
    imported = import_file(file, origin) if layers is None else import_group(file, layers, origin, members)
    write_and_show(output, imported, report.render_profile, as_json=as_json)


def cluster(
    device: Annotated[
        str | None, typer.Option("--device", help="Kind of device of this machine: cpu or cuda. Default: cpu.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            min=1,
            max=MAX_DEVICES,
            help="Number of devices. Default: all of this machine, or with --like one for each host.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Measure both directions between every two devices; with torchrun, those of the job."
        ),
    ] = False,
    like: Annotated[
        Path | None,
        typer.Option("--like", help="Devices that are not here: GPUs like the one in this profile."),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option("--hosts", min=1, max=MAX_DEVICES, help="With --like: number of hosts. Default: 1.")
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(
            "--within", help=f"With --like: the link within a host. One of {', '.join(CATALOGUE)}. Default: the GPU's."
        ),
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(
            "--between", help="With --like: the link between hosts, a network card for each device. Default: eth100."
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = Path("cluster.json"),
) -> None:
    """List the devices of this machine or job, and measure their links.

    With --like it describes devices that one does not have, with links of a catalogue.
    """
    check_output(output, *([like] if like else []))
    for option, value in (("--hosts", hosts), ("--within", within), ("--between", between)):
        if like is None and value is not None:
            raise BapipeError(
                f"{option} goes with --like, which describes devices that are not here: add --like PROFILE, or leave "
                f"{option} out to measure this machine"
            )
    if like is not None:
        if probe:
            raise BapipeError("--probe measures devices, and --like describes some that are not here: leave out either")
        if device is not None:
            raise BapipeError("--device chooses devices of this machine, and --like describes others: leave out either")
        num_hosts = hosts or 1
        measured = cluster_like(read(like, ModelProfile), devices or num_hosts, num_hosts, within, between or "eth100")
    elif probe:
        with parts_bar("probing") as progress:
            measured = probed_cluster(devices, device or "cpu", progress)
        if not is_first_rank():  # in a torchrun job only rank 0 reports
            return
    else:
        with status("measuring the link between two ranks"):
            measured = local_cluster(devices, device or "cpu")
    write_and_show(output, measured, report.render_cluster, as_json=as_json)
