"""A webhook on this machine: what it was sent, and how it answers."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from waiting import wait_until

PATH = "/services/T0/B0/verysecretpath"


@dataclass
class Webhook:
    """`received`: (headers, document) of each request; `answer`: the code of the next answers."""

    port: int
    received: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    answer: int = 200
    location: str | None = None
    hold: threading.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{PATH}"

    @property
    def texts(self) -> list[str]:
        return [document["text"] for _, document in self.received]

    def file(self, directory: Path) -> Path:
        """A private file with the address."""
        path = directory / "url"
        path.write_text(f"{self.url}\n")
        path.chmod(0o600)
        return path

    def wait(self, reached: Callable[[], bool]) -> None:
        wait_until(reached, lambda: f"received: {self.received}")


@contextlib.contextmanager
def webhook(port: int = 0) -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            if len(body) < length:  # whoever sent this has given up
                return
            assert self.path == PATH
            hook.received.append((dict(self.headers), json.loads(body)))
            if hook.hold is not None:
                hook.hold.wait(60)
            self.send_response(hook.answer)
            if hook.location is not None:
                self.send_header("Location", hook.location)
            self.end_headers()
            self.wfile.write(b"ok")

        do_GET = do_POST

        def log_message(self, format: str, *words: object) -> None:
            """No line per request."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    hook = Webhook(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        if hook.hold is not None:
            hook.hold.set()
        server.shutdown()
        server.server_close()
        thread.join(60)


def sendmail_stand_in(directory: Path, *, code: int = 0) -> Path:
    """A program like sendmail that keeps what it was given: `mail.txt`, `argv.txt`, `environ`."""
    program = directory / "sendmail"
    program.write_text(
        "#!/bin/sh\n"
        f'printf "%s\\n" "$@" >> {directory}/argv.txt\n'
        f"tr '\\0' '\\n' < /proc/self/environ > {directory}/environ\n"
        f"cat >> {directory}/mail.txt\n"
        f"exit {code}\n"
    )
    program.chmod(0o755)
    assert os.access(program, os.X_OK)
    return program
