"""The page in a real browser: cuts that are dragged, the planner, undo, exports, and names that hold markup."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

import bapipe
from bapipe.explorer.document import standalone_page
from bapipe.explorer.pages import plan_page, profile_page
from bapipe.explorer.server import Server
from bapipe.explorer.session import Session
from bapipe.formats.codec import decode
from bapipe.formats.plan import Plan
from bapipe.planner.analysis.pareto import pareto
from bapipe.planner.inputs.options import PlanOptions
from bapipe.simulator.simulate import simulate
from bapipe.units import number, number_down, percent_change, percent_up
from tests.builders import chain, devices
from tests.explorer.chromium import PATH, Browser

pytestmark = pytest.mark.skipif(PATH is None, reason="Chromium is not installed")

PLAIN = chain([1, 2, 3, 4, 2, 1, 5, 2], param_bytes=100, stash_bytes=10, output_bytes=1000)
MARKUP = "</script><img src=x onerror=document.title='markup'>"
PROFILE = replace(
    PLAIN,
    model=MARKUP,
    layers=tuple(replace(layer, name=f"{MARKUP}{i}", kind="<b>") for i, layer in enumerate(PLAIN.layers)),
)
LAYERS_OF_STAGES = "[...document.querySelectorAll('#stages tbody tr')].map((row) => row.cells[1].textContent)"
SHOWN_STEP = "Number(document.getElementById('figures').dataset.step)"


@contextmanager
def opened(folder: Path, session: Session, width: int = 1400) -> Iterator[Browser]:
    with Server(session) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            with Browser(folder, allowed=server.address, width=width) as browser:
                browser.open(server.address)
                yield browser
        finally:
            server.shutdown()
            thread.join()


def test_a_cut_is_dragged_the_planner_asked_and_the_plan_saved(tmp_path: Path) -> None:
    cluster = devices(3, bytes_per_s=10**6)
    session = Session({"a": PROFILE}, cluster, 12)
    first = session.first
    with opened(tmp_path / "browser", session) as browser:
        begun = browser.value(SHOWN_STEP)
        assert begun == session.plan(first).prediction.step_ns
        # The first cut moves by one layer: half of the height of two rows.
        box = browser.value(
            "(() => { const b = document.querySelector('.cut').getBoundingClientRect(); return [b.x + 40, b.y + 5, "
            "document.querySelector('.space').clientHeight / 8] })()"
        )
        x, y, row = box
        browser.mouse("mousePressed", x, y)
        browser.mouse("mouseMoved", x, y + row / 2)
        browser.mouse("mouseMoved", x, y + row)
        moved = replace(first, cuts=(first.cuts[0] + 1, *first.cuts[1:]))
        expected = session.plan(moved).prediction.step_ns
        browser.wait(f"{SHOWN_STEP} === {expected}")  # while the cut is held
        assert browser.value("document.getElementById('error').hidden")
        ends = (*moved.cuts, len(PROFILE.layers))
        sizes = [str(end - begin) for begin, end in pairwise((0, *ends))]
        assert browser.value(LAYERS_OF_STAGES) == sizes  # the rows of the stages beside the cut have changed
        browser.mouse("mouseReleased", x, y + row)
        browser.wait(f"document.querySelectorAll('#tried tbody tr').length === 2 && {SHOWN_STEP} === {expected}")
        assert expected != begun
        # The same by keyboard, back and forth.
        browser.value("document.querySelector('.cut').focus()")
        steps = {cut: session.plan(replace(first, cuts=(cut, 6))).prediction.step_ns for cut in (1, 2, 5)}
        keys = [("ArrowUp", begun), ("End", steps[5]), ("Home", steps[1]), ("ArrowDown", steps[2])]
        keys += [("ArrowDown", begun), ("ArrowDown", expected)]
        for key, step_ns in keys:
            for kind in ("keyDown", "keyUp"):
                browser.call("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key})
            browser.wait(f"{SHOWN_STEP} === {step_ns}")
        browser.click("undo")
        browser.wait(f"{SHOWN_STEP} === {begun}")
        browser.click("redo")
        browser.wait(f"{SHOWN_STEP} === {expected}")
        browser.value(
            "document.querySelector('#toolbar input[type=number]').value = 1000"
        )  # seconds: it may be slow here
        browser.click("best")
        best = bapipe.plan(PROFILE, cluster, minibatch_size=12)
        browser.wait(f"{SHOWN_STEP} === {best.prediction.step_ns}")
        # The bound is one of the schedules that were searched, which the line names where it can be seen.
        said = browser.value("document.getElementById('bound').textContent")
        assert best.certificate.proven_optimal
        assert said.startswith("No plan of the searched space is faster: ")
        assert "; schedules 1f1b, gpipe; " in said
        assert browser.value(
            "(() => { const p = document.getElementById('bound'); return p.scrollHeight <= p.clientHeight })()"
        )
        browser.value(
            "URL.createObjectURL = (blob) => { blob.text().then((text) => (document.body.dataset.saved = text)); "
            "return 'data:,' }"
        )
        browser.click("plan.json")
        browser.wait("document.body.dataset.saved")
        plan = decode(browser.value("document.body.dataset.saved").encode())
        assert isinstance(plan, Plan)
        assert plan.stages == best.stages
        assert simulate(plan, {"a": PROFILE}).step_ns == best.prediction.step_ns
        # Names with markup are texts.
        assert browser.value("document.querySelectorAll('img, main script, b').length") == 0
        assert browser.value("document.getElementById('model').textContent") == MARKUP
        assert browser.value("document.title") == MARKUP
        assert browser.problems == []


def test_a_plan_that_cannot_run_is_explained_on_the_page(tmp_path: Path) -> None:
    session = Session({"a": PLAIN}, devices(3), 12)
    with opened(tmp_path / "browser", session, width=390) as browser:
        browser.value(
            "(() => { const i = document.querySelector('#stages input[type=text]'); i.value = 'nowhere'; "
            "i.dispatchEvent(new Event('change')) })()"
        )
        browser.wait("!document.getElementById('error').hidden")
        assert "no device 'nowhere'" in browser.value("document.getElementById('error').textContent")
        assert browser.value("document.documentElement.scrollWidth") <= 390
        browser.click("undo")
        browser.wait("document.getElementById('error').hidden")
        # A layer is pinned in the table of layers; the box that was clicked keeps the focus.
        browser.click("Layers")
        pinned = "document.querySelectorAll('#layer-table input[type=checkbox]')[1]"
        browser.value(f"({pinned}.focus(), {pinned}.click())")
        browser.wait("document.querySelectorAll('#tried tbody tr').length === 3")
        assert browser.value(f"{pinned}.checked && document.activeElement === {pinned}")
        browser.click("undo")
        browser.wait(f"!{pinned}.checked")
        assert browser.problems == []


def test_plans_that_were_tried_in_a_hurry_have_their_own_figures(tmp_path: Path) -> None:
    session = Session({"a": PLAIN}, devices(3, bytes_per_s=10**6), 12)
    first = session.first
    before_first = first.cuts[0]
    with opened(tmp_path / "browser", session) as browser:
        # Three keys before the answer to the first one: the page asks for the newest state only, then for what it left.
        browser.value(
            "['ArrowUp', 'ArrowUp', 'ArrowDown'].forEach((key) => "
            "document.querySelector('.cut').dispatchEvent(new KeyboardEvent('keydown', { key })))"
        )
        states = [replace(first, cuts=(before_first - moved, *first.cuts[1:])) for moved in (0, 1, 2, 1)]
        steps = [session.plan(state).prediction.step_ns for state in states]
        assert len(set(steps)) == 3
        cells = "[...document.querySelectorAll('#tried tbody tr')].map((row) => row.cells[5].textContent).join()"
        expected = ",".join(browser.value(f"explorer.ms({step_ns})") for step_ns in steps)
        browser.wait(f"{cells} === {json.dumps(expected)}")
        # The devices of a stage are changed before the answer for others is there. The plan cannot run: its row says so.
        browser.value(
            "document.querySelector('.cut').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown' })), "
            "(() => { const i = document.querySelector('#stages input[type=text]'); i.value = 'd0, nowhere'; "
            "i.dispatchEvent(new Event('change')) })()"
        )
        browser.wait("document.querySelectorAll('#tried tbody tr').length === 6")
        browser.wait("document.querySelector('#tried tbody').lastChild.textContent.includes(\"no device 'nowhere'\")")
        assert browser.problems == []


def test_changes_are_named_by_what_they_do(tmp_path: Path) -> None:
    cluster = devices(3, bytes_per_s=10**6)
    named = replace(cluster.devices[0], name="constructor")  # which every object of JavaScript has
    session = Session({"a": PLAIN}, replace(cluster, devices=(named, *cluster.devices[1:])), 12)
    names = "[...document.querySelectorAll('#tried tbody tr')].map((row) => row.cells[1].textContent)"
    tried: list[str] = []
    with opened(tmp_path / "browser", session) as browser:
        assert browser.value("document.getElementById('controls').textContent.includes('its speed × 1.00')")
        for label, value, name in (
            ("stages", "-5", "1 stage"),
            ("stages", "2.4", "2 stages"),
            ("devices", "2.6", "3 devices"),
            ("memory, MiB", "-1", "memory as given"),
        ):
            browser.value(
                "(() => { const of = [...document.querySelectorAll('#controls label')].find((one) => "
                f"one.textContent.startsWith({json.dumps(label)})), i = of.querySelector('input'); "
                f"i.value = {json.dumps(value)}; i.dispatchEvent(new Event('change')) }})()"
            )
            tried.append(f"{len(tried) + 1}: {name}")
            browser.wait(f"{names}.length === {1 + len(tried)}")
            said = f"{label}: {value} is no whole number from 1 to "
            if not name.startswith("memory"):  # another number than the one that was typed is taken: a line says so
                browser.wait(f"document.getElementById('progress').textContent.startsWith({json.dumps(said)})")
                assert browser.value("document.getElementById('progress').textContent").endswith(
                    f"; {name.split()[0]} was taken"
                )
        assert browser.value(names)[1:] == tried
        # A gap is what something is at most. Plans are compared by the time of a sample: mini-batches may differ.
        figures = [{"step": ns, "rate": rate, "peak": 1, "gap": 0.00041, "fits": True} for ns, rate in ((9, 2), (5, 1))]
        entries = [{"figures": one, "name": "x", "state": {"cuts": [], "schedule": ""}} for one in figures]
        browser.value(
            "explorer.triedTable(document.body.appendChild(document.createElement('div')), "
            f"{json.dumps(entries)}, 0, {{}})"
        )
        cells = "[...document.body.lastChild.querySelectorAll('tbody tr')].map((row) => row.cells[%d].textContent)"
        assert browser.value(cells % 6) == ["2.00", "1.00"]
        assert browser.value(cells % 7) == ["", "+100.0%"]
        assert browser.value(cells % 9) == ["0.05%", "0.05%"]
        assert browser.value(cells % 10) == ["fastest", ""]
        assert browser.problems == []


def test_numbers_are_rounded_as_commands_print_them(tmp_path: Path) -> None:
    random = Random(7)
    values = [10 ** random.uniform(-5, 9) for _ in range(300)] + [0.0, 1.0, 999.5, 9.996, 2.675, 22.15, 1349.072142]
    shares = [10 ** random.uniform(-18, 3) for _ in range(300)] + [0.0, 0.032, 0.2215, 442.4291, 1.05 / 1 - 1]
    changes = [random.uniform(-1, 3) ** 3 for _ in range(200)] + [0.0, -0.0004, 0.0004, 0.0006, -0.0006]
    page = tmp_path / "page.html"
    page.write_bytes(profile_page(PLAIN))
    with Browser(tmp_path / "browser", allowed=page.as_uri()) as browser:
        browser.open(page.as_uri())
        assert browser.value(f"{values}.map(explorer.number)") == [number(value) for value in values]
        times = [max(1, round(value)) for value in values]
        assert browser.value(f"{times}.map(explorer.msDown)") == [f"{number_down(ns / 1e6)} ms" for ns in times]
        assert browser.value(f"{shares}.map((share) => explorer.percent(share))") == [f"{s:,.1%}" for s in shares]
        assert browser.value(f"{shares}.map(explorer.percentUp)") == [percent_up(share) for share in shares]
        assert browser.value(f"{changes}.map(explorer.percentChange)") == [percent_change(share) for share in changes]


def test_the_page_has_the_times_that_tables_print(tmp_path: Path) -> None:
    """Two replicas, which are one row until the user unfolds it, and a device without a stage."""
    profile = replace(PLAIN, layers=tuple(replace(layer, update_ns=10**6) for layer in PLAIN.layers))
    plan = bapipe.make(profile, devices(3, bytes_per_s=10**6), cuts=[], devices=[["d0", "d1"]], minibatch_size=12)
    step_ns, ranks = plan.prediction.step_ns, plan.prediction.ranks
    assert ranks[0].sync_ns > 0
    assert ranks[2].idle_ns == step_ns
    of_ranks = [
        [*(f"{number(ns / 1e6)} ms" for ns in (r.busy_ns, r.sync_ns, r.idle_ns)), f"{r.idle_ns / step_ns:.1%}"]
        for r in ranks
    ]
    page = tmp_path / "page.html"
    page.write_bytes(plan_page(plan, {"a": profile}))
    times = "[...document.querySelectorAll('#devices tbody tr')].map((r) => [...r.cells].slice(5, 9).map((c) => c.textContent))"
    height = "document.querySelector('#memory canvas').height"
    with Browser(tmp_path / "browser", allowed=page.as_uri()) as browser:
        browser.open(page.as_uri())
        assert browser.value(times) == [of_ranks[0], of_ranks[2]]
        folded = browser.value(height)
        browser.value("[...document.querySelectorAll('#timeline label')].at(-1).firstChild.click()")
        assert browser.value(times) == of_ranks
        assert browser.value(height) > folded
        assert browser.problems == []


def test_saved_pictures_have_cuts_and_legends_and_long_names_keep_their_ends(tmp_path: Path) -> None:
    long = "model.encoder.transformer_blocks.stack"
    layers = tuple(replace(layer, name=f"{long}.{i}.attention", kind="x") for i, layer in enumerate(PLAIN.layers))
    profile = replace(PLAIN, layers=layers)
    plan = bapipe.make(profile, devices(3), cuts=[2, 5], minibatch_size=12)
    page = tmp_path / "page.html"
    page.write_bytes(plan_page(plan, {"a": profile}))
    save = (
        "(async (name) => { let saved; URL.createObjectURL = (blob) => { saved = blob; return 'data:,' }; "
        "document.querySelector(`[aria-label='save the picture of the ${name}']`).click(); "
        "while (!saved) await new Promise((done) => setTimeout(done, 20)); "
        "return [saved.type, (await saved.arrayBuffer()).byteLength, await saved.text()] })"
    )
    with Browser(tmp_path / "browser", allowed=page.as_uri()) as browser:
        browser.open(page.as_uri())
        kind, _, layers_svg = browser.value(f"{save}('layers as SVG')")
        assert kind == "image/svg+xml"
        assert all(text in layers_svg for text in ("0 | 1", "1 | 2", ">F<", ">a cut's bytes<"))
        assert browser.value(f"{save}('timeline as SVG')")[2].count(">forward<") == 1
        kind, size, _ = browser.value(f"{save}('timeline as PNG')")
        assert kind == "image/png"
        assert size > 1000
        browser.value("document.querySelectorAll('[role=tab]')[0].click()")
        names = browser.value(
            "[...document.querySelectorAll('#stages .long')].map((n) => [n.textContent, n.offsetWidth])"
        )
        assert [name for name, _ in names] == [f"{long}.{i}.attention" for i in (0, 1, 2, 4, 5, 7)]
        ends = browser.value(
            "[...document.querySelectorAll('#stages .long')].map((name) => { const last = name.lastChild; "
            "return [last.textContent, last.scrollWidth <= last.clientWidth + 1 || last.offsetWidth > 0, "
            "name.firstChild.scrollWidth > name.firstChild.clientWidth] })"
        )
        assert ends[1] == ["ck.1.attention", True, True]
        assert browser.problems == []


def test_devices_in_one_row_have_all_their_hosts(tmp_path: Path) -> None:
    """Two devices of two hosts share the work of one stage, at the same times."""
    cluster = devices(2)
    apart = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], host="other")))
    profile = chain([1, 1])
    both = bapipe.make(profile, apart, cuts=[], devices=[["d0", "d1"]], minibatch_size=4)
    session = Session({"a": profile}, apart, both)
    with opened(tmp_path / "browser", session) as browser:
        hosts = "[...document.querySelectorAll('#devices tbody tr')].map((row) => row.cells[2].textContent).join('; ')"
        assert browser.value(hosts) == "h, other"


def test_the_front_is_computed_and_saved_with_the_page(tmp_path: Path) -> None:
    session = Session({"a": PLAIN}, devices(3, bytes_per_s=10**6), 12)
    front = pareto(session.profiles, session.cluster, PlanOptions(minibatch_size=12))
    cells = "[...document.querySelectorAll('#front tbody tr')].map((row) => row.cells[1].textContent).join()"
    points = f"{cells} && document.querySelector('#front canvas').offsetWidth > 0"
    with opened(tmp_path / "browser", session) as browser:
        browser.value(
            "document.querySelector('#toolbar input[type=number]').value = 1000"
        )  # seconds: it may be slow here
        browser.click("Front")
        browser.click("compute the front")
        browser.wait(points)
        steps = ",".join(browser.value(f"explorer.ms({point.step_ns})") for point in front)
        assert browser.value(cells) == steps
        browser.value(
            "URL.createObjectURL = (blob) => { blob.text().then((text) => (document.body.dataset.saved = text)); "
            "return 'data:,' }"
        )
        browser.click("page")
        browser.wait("document.body.dataset.saved")
        page = tmp_path / "page.html"
        page.write_text(browser.value("document.body.dataset.saved"))
        assert browser.problems == []
    with Browser(tmp_path / "again", allowed=page.as_uri()) as browser:
        browser.open(page.as_uri())
        browser.click("Front")
        assert browser.value(points)
        assert browser.value(cells) == steps
        browser.value("document.querySelector('#front tbody button').click()")
        assert browser.value(SHOWN_STEP) == front[0].step_ns
        assert browser.problems == []


def test_the_saved_page_works_without_a_server(tmp_path: Path) -> None:
    session = Session({"a": PROFILE}, devices(3), 12)
    other = replace(session.first, schedule="gpipe")
    page = tmp_path / "page.html"
    faster = replace(session.first, minibatch_size=6)
    curve: dict[str, object] = {
        "axis": "minibatch",
        "points": [
            {
                "value": state.minibatch_size,
                "step": session.plan(state).prediction.step_ns,
                "rate": 1.0,
                "peak": 1,
                "kind": "1 | 1 | 1",
                "gap": 0.0,
                "state": to_builtins(state),
            }
            for state in (faster, session.first)
        ],
    }
    tried = ("start", session.first), ("other", other)
    page.write_bytes(standalone_page(session, session.first, tried, {"minibatch": curve}))
    with Browser(tmp_path / "browser", allowed=page.as_uri()) as browser:
        browser.open(page.as_uri())
        steps = [session.plan(state).prediction.step_ns for state in (session.first, other)]
        assert browser.value(SHOWN_STEP) == steps[0]
        browser.click("other")
        assert browser.value(SHOWN_STEP) == steps[1]
        assert browser.value("[...document.querySelectorAll('canvas')].filter((c) => c.offsetWidth).length") == 3
        # Ctrl and the wheel zoom in: fewer actions are seen.
        browser.value("document.querySelector('#timeline summary').click()")
        rows = "document.querySelectorAll('#timeline tbody tr').length"
        browser.wait(rows)
        whole = browser.value(rows)
        x, y = browser.value(
            "(() => { const b = document.querySelector('#timeline canvas').getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + 20] })()"
        )
        wheel = {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": -600, "modifiers": 2}
        browser.call("Input.dispatchMouseEvent", wheel)
        browser.wait(f"{rows} < {whole}")
        # The computed curve is there, and the plans of its points.
        browser.click("What if")
        assert (
            browser.value("[...document.querySelectorAll('#whatif option')].map((o) => o.value).join()") == "minibatch"
        )
        assert browser.value("document.querySelector('#whatif canvas').offsetWidth") > 0
        browser.value("document.querySelector('#whatif tbody button').click()")
        assert browser.value(SHOWN_STEP) == session.plan(faster).prediction.step_ns
        assert browser.value("document.querySelectorAll('img, b').length") == 0
        assert browser.problems == []


def test_predicted_and_measured_rows_have_updates_and_all_reduces(tmp_path: Path) -> None:
    profile = replace(PLAIN, layers=tuple(replace(layer, update_ns=10**6) for layer in PLAIN.layers))
    places = [["d0", "d1"], ["d2"]]
    plan = bapipe.make(profile, devices(3, bytes_per_s=10**6), cuts=[4], devices=places, minibatch_size=12)
    step = simulate(plan, {"a": profile})
    later = [span._replace(end_ns=span.end_ns + 1) if i == 0 else span for i, span in enumerate(step.spans)]
    measured = dataclasses.replace(step, spans=tuple(later))
    page = tmp_path / "page.html"
    page.write_bytes(plan_page(plan, {"a": profile}, [("measured", measured)]))
    with Browser(tmp_path / "browser", allowed=page.as_uri()) as browser:
        browser.open(page.as_uri())
        drawn = browser.value(
            "(async () => { const data = document.getElementById('data').textContent, "
            "{ answer } = (await explorer.unpack(data)).tried[0], axis = new explorer.Axis(() => {}), "
            "place = document.body.appendChild(document.createElement('div')), view = new explorer.Timeline(place, axis); "
            "axis.setStep(answer.timeline.length); view.update(answer, [[0, 1], [2]]); "
            "const { root } = explorer.drawnWithLegend(view, (width, height) => new explorer.SvgContext(width, height)); "
            "const row = (rect) => Math.floor(rect.y.baseVal.value / view.rowHeight); "
            "const at = (fill) => [...root.querySelectorAll(`g g rect[fill='${fill}']`)].map(row).sort(); "
            "return [view.source.value, at(explorer.colour('update')), at('url(#sync)')] })()"
        )
        # A measured row below each predicted one; the first stage has two replicas, which exchange their gradients.
        assert drawn == ["both0", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
        # "By much the same" only where the factors of most actions are alike.
        assert browser.value("explorer.hintOf(1.2, 4)") == ""
        assert "by much the same" in browser.value("explorer.hintOf(1.33, 1.5)")
        assert "by very different factors" in browser.value("explorer.hintOf(1.33, 4.06)")
        assert browser.problems == []
