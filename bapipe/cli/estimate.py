"""The command that estimates the profile of a group: estimate."""

import re
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from bapipe import report
from bapipe.cli.options import AsJson, Output
from bapipe.cli.outputs import check_output, write_and_show
from bapipe.errors import BapipeError
from bapipe.estimates import estimate as estimate_group
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import read
from bapipe.formats.profile import ModelProfile, Split


def estimate(
    profile: Annotated[Path, typer.Argument(help="Profile of single devices.")],
    split: Annotated[
        str,
        typer.Option(
            "--split",
            metavar="HOW:MEMBERS",
            help="How the members share layers, and how many they are, such as spatial:4. "
            "tensor: output channels of one layer, input channels of the next (Megatron-LM); filter: output channels; "
            "channel: input channels; spatial: planes of images, places of texts; sharded: samples and parameters "
            "(ZeRO-3, FSDP).",
        ),
    ],
    cluster: Annotated[Path, typer.Option("--cluster", help="Cluster file, for the links among the members.")],
    whole: Annotated[
        list[str] | None,
        typer.Option("--whole", metavar="LAYER", help="A layer that every member computes whole. May be repeated."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Kind of the groups, for clusters that also have single devices.")
    ] = None,
    as_json: AsJson = False,
    output: Output = Path("group.json"),
) -> None:
    """Estimate the profile of a group of devices from that of a single one."""
    check_output(output, profile, cluster)
    how, _, members = split.partition(":")
    if how not in get_args(Split) or not re.fullmatch("[0-9]{1,9}", members):
        raise BapipeError(f"--split {split}: want one of {', '.join(get_args(Split))}, and members, such as spatial:4")
    estimated = estimate_group(
        read(profile, ModelProfile),
        cast(Split, how),
        int(members),
        read(cluster, Cluster),
        whole=whole or (),
        kind=kind,
    )
    write_and_show(output, estimated, report.render_profile, as_json=as_json)
