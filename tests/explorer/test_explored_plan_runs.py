"""From the command line to a run: a cut is dragged in a browser, the plan is simulated, saved, trained and drawn."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from bapipe.formats.codec import write
from bapipe.formats.profile import LOSS, TARGET, ModelProfile
from tests import ROOT
from tests.builders import chain
from tests.explorer.chromium import PATH, Browser

pytestmark = pytest.mark.skipif(PATH is None, reason="Chromium is not installed")

COMMAND = [sys.executable, "-c", "from bapipe.cli import main; main()"]
TIMEOUT_S = 300
STEP = "Number(document.getElementById('figures').dataset.step)"
FIRST_CUT = "Number(document.querySelector('.cut').ariaValueNow)"
TRIED = "document.querySelectorAll('#tried tbody tr').length"
SAVED = "document.body.dataset.saved"
KEEP_FILES = f"URL.createObjectURL = (blob) => {{ blob.text().then((text) => ({SAVED} = text)); return 'data:,' }}"


def profile_of_tiny() -> ModelProfile:
    """Returns a profile of `tests/models/tiny.py` with times by hand: nothing is measured, every run has the same."""
    names = "0", "1", "2", "3", LOSS
    plain = chain([3, 1, 2, 4, 1], param_bytes=64, stash_bytes=64, output_bytes=64)
    layers = [
        replace(layer, name=name, inputs=(before,), outputs=(name,))
        for layer, name, before in zip(plain.layers, names, ("input", *names), strict=False)
    ]
    layers[-1] = replace(layers[-1], inputs=("3", TARGET))
    device = replace(plain.device, kind="cpu")
    return replace(plain, model="tiny", factory="tiny:tiny", device=device, layers=tuple(layers))


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "150"}


def bapipe(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def drag_first_cut(browser: Browser, num_rows: int) -> None:
    """Moves the first cut down by so many layers, with the mouse."""
    x, y, row = browser.value(
        "(() => { const b = document.querySelector('.cut').getBoundingClientRect(); return [b.x + 40, b.y + 6, "
        "document.querySelector('.space').clientHeight / 5] })()"
    )
    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseMoved", x, y + num_rows * row / 2)
    browser.mouse("mouseMoved", x, y + num_rows * row)
    browser.mouse("mouseReleased", x, y + num_rows * row)


def explore_and_save(address: str, folder: Path, path: Path) -> int:
    """Drags a cut, asks for the best plan, takes that back and saves the plan; returns the step time that is shown."""
    with Browser(folder, allowed=address) as browser:
        browser.open(address)
        begun, cut = browser.value(STEP), browser.value(FIRST_CUT)
        drag_first_cut(browser, -1)
        browser.wait(f"{FIRST_CUT} === {cut - 1} && {STEP} !== {begun} && {TRIED} === 2")
        dragged: int = browser.value(STEP)
        browser.click("best")
        browser.wait(f"{TRIED} === 3 && {STEP} < {dragged}")
        browser.click("undo")
        browser.wait(f"{STEP} === {dragged}")
        browser.value(KEEP_FILES)
        browser.click("plan.json")
        browser.wait(SAVED)
        path.write_text(browser.value(SAVED))
        assert browser.problems == []
    return dragged


def test_a_plan_dragged_in_the_browser_is_simulated_and_trained(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "models" / "tiny.py", tmp_path)
    write(tmp_path / "profile.json", profile_of_tiny())
    served = [*COMMAND, "explore", "profile.json", "--devices", "2", "--minibatch-size", "8", "--no-browser"]
    with subprocess.Popen(
        served, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        too_long = threading.Timer(TIMEOUT_S, server.kill)
        too_long.start()
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            step_ns = explore_and_save(address, tmp_path / "browser", tmp_path / "mine.json")
        finally:
            too_long.cancel()
            server.terminate()
    # What the page showed is what `bapipe simulate` says of the saved plan, to the nanosecond.
    assert json.loads(bapipe(tmp_path, "simulate", "mine.json", "profile.json", "--json"))["step_ns"] == step_ns
    training = ("--data", "tiny:own", "--steps", "2", "--json", "--trace", "measured.json")
    assert json.loads(bapipe(tmp_path, "run", "mine.json", *training))["predicted_step_ns"] == step_ns
    # The measured step is drawn over the predicted one, on one axis.
    bapipe(
        tmp_path, "show", "mine.json", "--trace", "measured.json", "--profile", "profile.json", "--html", "page.html"
    )
    page = (tmp_path / "page.html").as_uri()
    with Browser(tmp_path / "again", allowed=page) as browser:
        browser.open(page)
        assert browser.value(STEP) == step_ns
        assert browser.value("document.querySelectorAll('#measured tbody tr').length") == 10
        assert browser.problems == []
