"""A real headless Chromium for tests, driven over DevTools through a pipe: standard library only, no port, no network.

    with Browser() as browser:
        browser.open(path)
        browser.evaluate("document.title")

Deliberately absent: waiting for a time; everything waits for a condition.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
PATIENCE = 180.0  # seconds; only a hang takes so long
KEYS = {"Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "End": 35}


class Browser:
    """One Chromium with one page. What scripts complain of is in `errors`, every address asked for in `requests`."""

    def __init__(self, width: int = 1440, height: int = 900) -> None:
        assert CHROMIUM is not None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number, self._rest = 0, b""
        self._profile = tempfile.TemporaryDirectory(prefix="hsg-browser-", ignore_cleanup_errors=True)
        pipes = [*os.pipe(), *os.pipe()]
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in pipes]  # away from 3 and 4
        for end in pipes:
            os.close(end)
        its_input, self._write, self._read, its_output = ends
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
                 "--no-sandbox", f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"]  # fmt: skip
        nowhere = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, nowhere, end) for end in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, its_input, 3), (os.POSIX_SPAWN_DUP2, its_output, 4)]
        self._pid = os.posix_spawn(
            CHROMIUM, [CHROMIUM, *flags, "about:blank"], dict(os.environ), file_actions=actions, setpgroup=0
        )
        for end in (its_input, its_output, nowhere):
            os.close(end)
        self._session: str | None = None
        targets = self._wait(lambda: [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"])
        attached = self.call("Target.attachToTarget", targetId=targets[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command and its result; events that come meanwhile are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], PATIENCE)[0], "Chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.errors.append(str([a.get("value") for a in given["args"]]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {given['message']}")

    def _wait(self, condition: Any) -> Any:
        end = time.monotonic() + PATIENCE
        while not (value := condition()):
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)
        return value

    def open(self, path: Path, fragment: str = "") -> None:
        """Open a file of `hsg view` and wait until it is ready."""
        self.call("Page.navigate", url="about:blank")
        self.requests.clear()
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.until("location.protocol === 'file:' && document.documentElement?.dataset.ready === 'yes'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until the expression holds in the page."""
        return self._wait(lambda: self.evaluate(expression))

    def until_equal(self, expression: str, value: Any) -> None:
        """Wait until the expression has this value in the page."""
        self._wait(lambda: self.evaluate(expression) == value)

    def settle(self) -> None:
        """Two frames later: what was asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def press(self, key: str) -> None:
        """One key, where the focus is."""
        text = {} if len(key) > 1 else {"text": key}
        code = KEYS.get(key, ord(key[0].upper()))
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.settle()

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
