"""Commands that measure, or take what others measured: profile, import, cluster."""

import os
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from bapipe import report
from bapipe.cli.options import Arguments, Devices, Kind, Output, Sizes, integers, key_values
from bapipe.cli.progress import err, out, parts_bar, show_parts
from bapipe.errors import BapipeError
from bapipe.formats.codec import check_writable, write
from bapipe.formats.settings import Settings
from bapipe.importers import NUM_OPTIMIZER_STATES, Origin, import_file
from bapipe.planner.inputs import local_cluster, probed_cluster
from bapipe.profiler.profile import profile_model
from bapipe.zoo import ZOO


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
        bool, typer.Option("--layer-by-layer", help="Hold one layer at a time, for models that do not fit.")
    ] = False,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Measure each of equal layers by itself.")] = False,
    whole: Annotated[
        list[str] | None,
        typer.Option("--whole", metavar="PATH", help="Take a module as one layer, such as 'encoder.*'; repeatable."),
    ] = None,
    fine: Annotated[bool, typer.Option("--fine", help="Make operators between modules layers of their own.")] = False,
    neighbours: Annotated[
        int,
        typer.Option(
            "--neighbours", min=0, help="Processes that train the model meanwhile, as on a CPU's other cores."
        ),
    ] = 0,
    output: Output = Path("profile.json"),
) -> None:
    """Measure each layer of a model: times of F, I and W, and bytes."""
    sizes = integers(microbatch_size)
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
    with parts_bar() as tell:
        measured = profile_model(
            model,
            key_values(arg),
            device=device,
            microbatch_sizes=sizes,
            settings=settings,
            layer_by_layer=layer_by_layer,
            exhaustive=exhaustive,
            leaf_modules=whole or (),
            operator_layers=fine,
            num_co_runners=neighbours,
            progress=tell,
        )
    write(output, measured)
    show_parts(report.render_profile(measured))
    out.print(f"wrote {output}", highlight=False)


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
    optimizer: Annotated[
        str, typer.Option("--optimizer", help=f"One of {', '.join(NUM_OPTIMIZER_STATES)}.")
    ] = "sgd-momentum",
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
        sizes=integers(microbatch_size) if microbatch_size else (batch_size,),
        optimizer=optimizer,
    )
    imported = import_file(file, origin)
    write(output, imported)
    show_parts(report.render_profile(imported))
    out.print(f"wrote {output}", highlight=False)


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
        with parts_bar("probing") as tell:
            found = probed_cluster(devices, device, tell)
        if os.environ.get("RANK", "0") != "0":  # of a torchrun job: rank 0 reports
            return
    else:
        with err.status("measuring the link between two ranks"):
            found = local_cluster(devices, device)
    write(output, found)
    show_parts(report.render_cluster(found))
    out.print(f"wrote {output}", highlight=False)
