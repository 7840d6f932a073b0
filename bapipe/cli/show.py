"""The command that shows files as tables and as pages: show.

Pages are written before anything is printed, of which a reader such as `head` may want only a part.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

import bapipe
from bapipe import report
from bapipe.cli.options import AsJson
from bapipe.cli.outputs import check_output, write_output_bytes
from bapipe.cli.printing import note, out, show_json, show_line, show_parts, show_timeline, show_written
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import fingerprint, read, read_any
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.report.chrome_trace import recorded_timelines
from bapipe.report.plan_changes import render_changes
from bapipe.report.profile_diff import render_profile_diff
from bapipe.simulator.simulate import unit_cost_timeline
from bapipe.simulator.timeline import Timeline


def show(
    file: Annotated[Path, typer.Argument(help="Profile, cluster or plan file.")],
    other: Annotated[
        Path | None, typer.Argument(help="A second profile or plan, to compare the first one with.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Also write the plan, two plans or the profile to this file, as an HTML page."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="With a plan: a trace that simulate or run wrote, to draw. May be repeated."),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="With --html: a profile of the plan, if the cache has it no more."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a profile, a cluster or a plan, or the difference of two."""
    content = read_any(file)
    if profile and html is None:
        raise BapipeError("--profile goes with --html: the page shows the times of its layers; add --html FILE")
    if as_json:
        if html is not None or trace:
            raise BapipeError("--json goes without --html and --trace")
        _show_json(content, other)
        return
    if trace and not isinstance(content, Plan):
        raise BapipeError(f"--trace goes with a plan; {file} is {_in_words(content)}")
    if trace and other is not None:
        raise BapipeError("--trace goes with one plan, not with two")
    if html is not None:
        if isinstance(content, Cluster):
            raise BapipeError(f"--html goes with a plan or a profile; {file} is {_in_words(content)}")
        if other is not None and not isinstance(content, Plan):
            raise BapipeError("--html goes with two plans, not with two profiles")
        check_output(html, file, *([other] if other else []), *(trace or []), *(profile or []))
    profiles = [read(path, ModelProfile) for path in profile or ()]
    if other is not None:
        _show_two(content, file, other, html, profiles)
    elif isinstance(content, Cluster):
        show_parts(report.render_cluster(content))
    elif isinstance(content, ModelProfile):
        _show_profile(content, html)
    else:
        _show_plan(content, html, trace or [], profiles)
    if html is not None:
        show_written(html)


def _in_words(content: Plan | ModelProfile | Cluster) -> str:
    return "a plan" if isinstance(content, Plan) else "a profile" if isinstance(content, ModelProfile) else "a cluster"


def _show_json(content: Plan | ModelProfile | Cluster, other: Path | None) -> None:
    """Prints a file, or the differences of two plans, as JSON."""
    if other is None:
        show_json(content)
    elif isinstance(content, Plan):
        show_json({"changes": list(render_changes(content, read(other, Plan)))})
    else:
        raise BapipeError("--json goes with one file or with two plans")


def _show_two(
    content: Plan | ModelProfile | Cluster, file: Path, other: Path, html: Path | None, profiles: Sequence[ModelProfile]
) -> None:
    """Prints the differences of two profiles or of two plans."""
    if isinstance(content, Cluster):
        raise BapipeError(f"{file} is a cluster: name two plans or two profiles to compare, or this file alone")
    if isinstance(content, ModelProfile):
        show_parts(render_profile_diff(content, read(other, ModelProfile)))
        return
    after = read(other, Plan)
    changes = list(render_changes(content, after))
    if html is not None:
        from bapipe.explorer.pages import two_plans_page

        of_first, of_second = _known_profiles(content, profiles, after), _known_profiles(after, profiles, content)
        write_output_bytes(html, two_plans_page((file.name, content, of_first), (other.name, after, of_second)))
    for line in changes:
        out.print(line, highlight=False, soft_wrap=True, markup=False)


def _show_profile(profile: ModelProfile, html: Path | None) -> None:
    """Prints a profile."""
    if html is not None:
        from bapipe.explorer.pages import profile_page

        write_output_bytes(html, profile_page(profile))
    show_parts(report.render_profile(profile))


def _show_plan(plan: Plan, html: Path | None, traces: Sequence[Path], profiles: Sequence[ModelProfile]) -> None:
    """Prints a plan with its recorded timelines; without any, with its step if the cache has its profile.

    Else its order is drawn in units of a millisecond.
    """
    recorded = recorded_timelines(plan, traces)
    if html is not None:
        from bapipe.explorer.pages import plan_page

        write_output_bytes(html, plan_page(plan, _known_profiles(plan, profiles), recorded))
    predicted = _predicted(plan)
    show_parts(report.render_plan(plan, predicted))
    for title, timeline in recorded:
        show_line(f"{title}:")
        show_timeline(timeline)
    if predicted is not None and not recorded:
        show_timeline(predicted)
    elif not recorded:
        show_line("order, not to scale (F, I and W take 1 ms, B 2 ms, transfers nothing):")
        show_timeline(unit_cost_timeline(plan))


def _predicted(plan: Plan) -> Timeline | None:
    """Returns the predicted step of a plan; None if the cache lacks its profiles, or it was changed by hand."""
    from bapipe.cli.inputs import profiles_of_plan  # loads the planner

    if not plan.is_judged:
        return None
    with suppress(BapipeError):
        return bapipe.simulate(plan, profiles_of_plan(plan, []))
    return None


def _known_profiles(plan: Plan, given: Sequence[ModelProfile], beside: Plan | None = None) -> dict[str, ModelProfile]:
    """Returns the profiles of a plan, none if they are neither given nor in the cache.

    Args:
        beside: another plan; profiles that it alone was made from are not of this one.
    """
    from bapipe.cli.inputs import profiles_of_plan  # loads the planner

    if beside is not None:
        of_other = set(beside.profiles.values()) - set(plan.profiles.values())
        given = [profile for profile in given if fingerprint(profile) not in of_other]
    if given:
        return profiles_of_plan(plan, given)
    with suppress(BapipeError):
        return profiles_of_plan(plan, [])
    note("the profile of the plan is not at hand, so the page has no times of its layers: name its file with --profile")
    return {}
