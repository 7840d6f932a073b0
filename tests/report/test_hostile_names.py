"""Names that a terminal, a page or rich would take for more than text are shown as text, everywhere."""

import re
import unicodedata
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from random import Random

import msgspec
import pytest
from rich.console import Console

from bapipe.cli import printing
from bapipe.cli.markdown import write_markdown
from bapipe.cli.vary import csv_cell
from bapipe.explorer.pages import plan_page, profile_page
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import decode_as, encode
from bapipe.formats.plan import Plan
from bapipe.formats.profile import EQUIVALENCE, LOSS_OVER_PARTS, ONE_LAYER, SHARED_BUFFERS, ModelProfile
from bapipe.planner.plan import plan
from bapipe.printable import printable
from bapipe.report import encode_trace, gantt, render_cluster, render_comparison, render_plan, render_profile
from bapipe.report.chrome_trace import read_trace
from bapipe.report.profile_diff import render_profile_diff
from bapipe.simulator.simulate import simulate
from tests.builders import devices
from tests.explorer.page_data import data_of
from tests.random_profiles import random_profile

NAMES = (
    "<script>alert(1)</script>&amp;\"'",
    "\x1b[31mred\x1b]0;title\x07\x9b2J\r\b\x00",
    "[bold red]x[/bold red][/no][link=http://a]:smile:",
    "line\nerror: another\u2028line\x85x",
    "\u202egnp.exe\u2066\u200b\u200d\ufeff\u061c",
    "x" * 10_000,
    "=cmd|' /C calc'!A0",
    " sends",
)


@pytest.fixture(scope="module", params=NAMES, ids=range(len(NAMES)))
def named(request: pytest.FixtureRequest) -> tuple[ModelProfile, Cluster, Plan]:
    """A profile, a cluster and a plan in which every name that a file may choose ends in a hostile one."""
    bad = request.param
    tame = random_profile(Random(1), 4)
    names = [layer.name for layer in tame.layers]
    text = encode(tame).decode()
    for name in (*names, *(tensor for layer in tame.layers for tensor in layer.outputs)):
        text = text.replace(f'"{name}"', msgspec.json.encode(name + bad).decode())
    notes = {EQUIVALENCE: bad, LOSS_OVER_PARTS: bad, ONE_LAYER: {bad: bad}, SHARED_BUFFERS: {bad: [bad]}, bad: bad}
    profile = msgspec.structs.replace(
        decode_as(text.encode(), ModelProfile),
        model=bad,
        dtype=bad,
        optimizer=bad,
        environment=notes,
        device=msgspec.structs.replace(tame.device, kind=bad, name=bad),
        layers=tuple(
            msgspec.structs.replace(layer, kind=bad) for layer in decode_as(text.encode(), ModelProfile).layers
        ),
    )
    cluster = devices(2, memory_bytes=10**9)
    cluster = msgspec.structs.replace(
        cluster,
        devices=tuple(
            msgspec.structs.replace(d, name=f"d{i}{bad}", kind=bad, host=bad) for i, d in enumerate(cluster.devices)
        ),
    )
    return profile, cluster, plan(profile, cluster, minibatch_size=8, num_stages=2, microbatch_size=4)


def harmful(text: str) -> set[str]:
    """The characters of a text that are neither shown nor a line break of its own."""
    return {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


def shown(parts: Iterator[object]) -> str:
    console = Console(file=StringIO(), width=150, markup=False, emoji=False, force_terminal=False)
    for part in parts:
        console.print(part, highlight=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_tables_show_every_name_as_text(named: tuple[ModelProfile, Cluster, Plan]) -> None:
    profile, cluster, found = named
    timeline = simulate(found, {profile.device.kind: profile})
    other = msgspec.structs.replace(profile, model="other", environment={"x": profile.model}, dtype="y")
    texts = [
        shown(iter(render_plan(found, timeline))),
        shown(iter(render_profile(profile))),
        shown(iter(render_cluster(cluster))),
        shown(iter(render_profile_diff(profile, other))),
        shown(iter(render_comparison({"a": found}, found.alternatives, {"b": profile.model}))),
        gantt(timeline, 150),
    ]
    for text in texts:
        assert harmful(text) == set()
        assert not any(line.startswith("error:") for line in text.splitlines())
        assert len(text) < 60_000
    if "[bold red]" in profile.model:  # rich neither reads markup nor replaces names of emoji
        assert "[bold red]" in texts[0]
        assert ":smile:" in texts[0]


def test_pages_show_every_name_as_text(named: tuple[ModelProfile, Cluster, Plan]) -> None:
    profile, _, found = named
    timeline = simulate(found, {profile.device.kind: profile})
    for page in (plan_page(found, {}, [(profile.model, timeline)]), profile_page(profile)):
        text = page.decode()
        assert harmful(text) == set()
        # Names are in the title, and in the data, which holds no markup; the scripts show them as texts.
        assert re.findall(r"<(script|img|link|iframe)\b", text) == ["script", "script"]
        assert re.fullmatch(r"[A-Za-z0-9+/=]+", text.partition('id="data">')[2].partition("<")[0])
        assert data_of(page)["model"]["model"] == profile.model
        assert len(text) < 200_000


def test_traces_keep_every_name(named: tuple[ModelProfile, Cluster, Plan], tmp_path: Path) -> None:
    profile, _, found = named
    timeline = simulate(found, {profile.device.kind: profile})
    path = tmp_path / "trace.json"
    path.write_bytes(encode_trace([(profile.model, timeline)]))
    ((title, again),) = read_trace(path)
    assert title == profile.model
    assert again.devices == timeline.devices
    assert again.spans == timeline.spans


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        ("plain, größer, 模型, שם", "plain, größer, 模型, שם"),
        ("\x1b[0m\x9b", r"\x1b[0m\x9b"),
        ("a\nb\r\u2028", r"a\nb\r\u2028"),
        ("\u202e\u200b\ufeff", r"\u202e\u200b\ufeff"),
        ("\udcff", r"\udcff"),
        ("\U000e0001", r"\U000e0001"),
    ],
)
def test_a_character_that_is_not_shown_is_an_escape(text: str, shown_as: str) -> None:
    assert printable(text) == shown_as


def test_a_long_name_keeps_both_ends() -> None:
    assert printable("a" * 50 + "b" * 50, 30) == "a" * 20 + "…" + "b" * 10


def test_remarks_and_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=StringIO(), markup=False, emoji=False, force_terminal=False)
    monkeypatch.setattr(printing, "err", console)
    printing.note("a\x1b[2J\n[/b]")
    printing.show_error("b\u202e :smile: \n" + "x" * 10_000)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == r"a\x1b[2J\n[/b]"
    assert lines[1].startswith(r"error: b\u202e :smile: \nxxx")
    assert (len(lines), len(lines[1]) < 2100) == (2, True)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_text_in_csv_is_no_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"
    assert [csv_cell(value) for value in ("1f1b", -1, 2.5, None)] == ["1f1b", -1, 2.5, None]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_cell_of_a_table_in_markdown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_markdown(["plan", "why_not"], [{"plan": 1, "why_not": f"no layer of {name}|x"}])
    text = capsys.readouterr().out
    assert harmful(text) == set()
    assert [line.count("|") for line in text.splitlines()] == [3, 3, 3]


def test_a_name_in_markdown_is_neither_html_nor_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    name = r"<img src=x>&lt; [a](javascript:b) `c` *d* __e__ ~~f~~ \|g"
    write_markdown(["step_ns", "why_not"], [{"step_ns": 1.5, "why_not": name}])
    assert capsys.readouterr().out.splitlines() == [
        "| step_ns | why_not |",
        "| --- | --- |",
        r"| 1.5 | &lt;img src=x&gt;&amp;lt; \[a\](javascript:b) \`c\` \*d\* \_\_e\_\_ \~\~f\~\~ \\&#124;g |",
    ]
