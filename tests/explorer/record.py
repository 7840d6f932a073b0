"""Records the walk-through of docs/exploring.md: `python -m tests.explorer.record`, with Chromium and Pillow.

Every picture is the page of VGG-16 on four V100s of two hosts after one more action of its user.
"""

import base64
import io
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from bapipe.explorer.server import Server
from bapipe.explorer.session import Session
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.codec import read
from bapipe.formats.profile import ModelProfile
from tests import ROOT
from tests.explorer.chromium import Browser

NUM_COLOURS = 128
SIZE = 1280, 860

CLUSTER = Cluster(
    devices=tuple(
        Device(name=f"gpu{i}", host=f"host{i // 2}", kind="cuda", memory_bytes=16 * 2**30, overlaps_transfers=True)
        for i in range(4)
    ),
    intra_host=Bandwidth(bytes_per_s=12 * 10**9, latency_ns=10_000),
    inter_host=Bandwidth(bytes_per_s=6 * 10**9, latency_ns=20_000),
)


@contextmanager
def opened(session: Session) -> Iterator[Browser]:
    with Server(session) as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Browser(Path(folder), allowed=server.address, width=SIZE[0], height=SIZE[1]) as browser:
            browser.call("Emulation.setScrollbarsHidden", {"hidden": True})
            browser.open(server.address)
            browser.value("document.querySelector('#toolbar input[type=number]').value = 20")
            yield browser
        server.shutdown()


def record(browser: Browser, path: Path) -> None:
    """Writes a picture of the window with few colours."""
    browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    shot = base64.b64decode(browser.call("Page.captureScreenshot", {"format": "png"})["data"])
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    if browser.problems:
        raise SystemExit(str(browser.problems))


def walk(browser: Browser, folder: Path) -> None:
    tried = "document.querySelectorAll('#tried tbody tr').length"
    x, y = browser.value(
        "(() => { const b = document.querySelector('.cut').getBoundingClientRect(); return [b.x + 60, b.y + 6] })()"
    )
    browser.mouse("mousePressed", x, y)
    for far in (10, 25, 42):
        browser.mouse("mouseMoved", x, y + far)
    record(browser, folder / "walk-1-drag.png")
    browser.mouse("mouseReleased", x, y + 42)
    browser.mouse("mouseMoved", 4, 4)
    browser.wait(f"{tried} === 2")
    browser.click("Idle time")
    browser.value("document.querySelector('#tabs').scrollIntoView({ block: 'center' })")
    record(browser, folder / "walk-2-idle.png")
    browser.click("best")
    browser.wait(f"{tried} === 3")
    browser.value("window.scrollTo(0, 0)")
    record(browser, folder / "walk-3-best.png")
    for tab, button, rows, name in (
        ("Front", "compute the front", "#front", "walk-4-front"),
        ("What if", "compute this curve", "#whatif", "walk-5-what-if"),
    ):
        browser.click(tab)
        browser.click(button)
        browser.wait(
            f"document.querySelectorAll('{rows} tbody tr').length && {json.dumps(button)} === "
            f"document.querySelector('{rows} button:not(.quiet)').textContent"
        )
        browser.value("document.querySelector('#tabs').scrollIntoView()")
        record(browser, folder / f"{name}.png")
    browser.click("Plans tried")
    for index in (0, 2):
        browser.value(f"document.querySelectorAll('#tried input')[{index}].click()")
    browser.wait("!document.querySelector('#compared').hidden")
    browser.value("document.querySelector('#tabs').scrollIntoView()")
    record(browser, folder / "walk-6-side-by-side.png")


def main(folder: Path) -> None:
    profile = read(ROOT / "profiles" / "v100" / "vgg16.json", ModelProfile)
    session = Session({profile.device.kind: profile}, CLUSTER, 512)
    with opened(session) as browser:
        record(browser, folder / "explorer.png")
        walk(browser, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
