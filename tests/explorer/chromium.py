"""A headless Chromium that tests drive over the pipes of its DevTools protocol."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

TIMEOUT_S = 60

_START = """if True:
    import fcntl, os, sys
    # Out of the way first: one of them may be 3 or 4 itself.
    pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, 10) for number in sys.argv[1:3]]
    os.dup2(pipes[0], 3), os.dup2(pipes[1], 4)
    os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts a browser with two pipes as its descriptors 3 and 4; a shell takes numbers of one digit only."""


class Browser:
    """One tab. `problems` are the errors in its console, and its requests to other addresses than `allowed`."""

    def __init__(
        self, folder: Path, *, allowed: str, width: int = 1400, height: int = 1000, dark: bool = False
    ) -> None:
        assert PATH is not None
        self._allowed, self.problems = allowed, list[str]()
        commands, self._answers = os.pipe(), os.pipe()
        replies = self._answers
        # The browser reads commands from descriptor 3 and writes replies to 4, each ended by a zero byte.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, str(commands[0]), str(replies[1])),
                PATH,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
                f"--user-data-dir={folder}",
                f"--window-size={width},{height}",
                *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            ],
            pass_fds=(commands[0], replies[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(replies[1])
        self._to, self._from = os.fdopen(commands[1], "wb", buffering=0), os.fdopen(replies[0], "rb")
        self._buffer, self._number = b"", 0
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._tab = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._to.close()  # the browser ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._from.close()

    def call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the result of a command to the tab."""
        return self._call(method, parameters or {}, self._tab)

    def open(self, address: str) -> None:
        """Opens an address, and waits until its page says that it is ready."""
        self.call("Page.navigate", {"url": address})
        self.wait("document.body && document.body.dataset.ready === 'yes'")

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; that of a promise when it is there."""
        parameters = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", parameters)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.value(condition):
            assert time.monotonic() < deadline, f"still false: {condition}; {self.problems}"
            time.sleep(0.05)

    def click(self, text: str) -> None:
        """Clicks the first button with this text."""
        self.value(
            f"[...document.querySelectorAll('button')].find((b) => b.textContent === {json.dumps(text)}).click()"
        )

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Sends a mouse event: mousePressed, mouseMoved or mouseReleased, with the left button."""
        button = {"button": "left", "clickCount": 1, "buttons": 1}
        self.call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **button})

    def _call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._to.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._from], [], [], TIMEOUT_S)[0], "the browser does not answer"
            chunk = os.read(self._from.fileno(), 1 << 16)
            assert chunk, "the browser ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        """Keeps what must not happen."""
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(str(parameters["entry"]))
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith((self._allowed, "blob:", "data:")):
                self.problems.append(f"a request to {url}")
