"""A real Chromium that opens pages: through pipes, without a port and without a package.

Commands and events are those of the Chrome DevTools Protocol; Chromium reads them from descriptor 3
and writes to descriptor 4, each ended by a zero byte (`--remote-debugging-pipe`).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE_SECONDS = 60.0
# Moves the pipes to the descriptors that Chromium looks at.
_STARTER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def _high(*descriptors: int) -> list[int]:
    """Move descriptors out of the way of 3 and 4."""
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in descriptors]
    for one in descriptors:
        os.close(one)
    return moved


class Chromium:
    """One headless Chromium with one page."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        to_browser, self._write = _high(*os.pipe())
        self._read, from_browser = _high(*os.pipe())
        words = [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
        words += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _STARTER, str(to_browser), str(from_browser), *words],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._write)  # Chromium leaves when nobody can tell it anything any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._read)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            assert ready, "Chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, page: Path, *, width: int, dark: bool, height: int = 900) -> None:
        """Open a file in a window of that size and theme, and wait until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not any(one.get("method") == "Page.loadEventFired" for one in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """Ask the page; the protocol is not bound by the page's own policy."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(
        self,
        path: Path,
        *,
        whole: bool = False,
        part: tuple[float, float, float, float] | None = None,
    ) -> None:
        """Write what is seen, the whole page, or a part of it (x, y, width, height) as PNG."""
        more: dict[str, object] = {"captureBeyondViewport": whole or part is not None}
        if part is not None:
            more["clip"] = dict(zip(("x", "y", "width", "height"), part, strict=True)) | {
                "scale": 1
            }
        found = self.call("Page.captureScreenshot", format="png", **more)
        path.write_bytes(base64.b64decode(found["data"]))
