"""A stand-in engine as a process of a test, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.free_ports import free_port

SERVED_NAME = "tiny"


def request(url: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of a response, of errors too; raises OSError where nothing answers."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=20
        ) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextlib.contextmanager
def stand_in(
    directory: Path, *words: str, answers: bool = True, **settings: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a stand-in with these settings; gives the process and its URL, once it answers."""
    path, port = directory / "stand-in.json", free_port()
    path.write_text(json.dumps(settings))
    argv = [sys.executable, "-m", "hpctrain.serve.stand_in", str(directory)]
    argv += ["--served-model-name", SERVED_NAME, "--port", str(port), *words]
    process = subprocess.Popen(
        argv,
        env={**os.environ, "STAND_IN_ENGINE": str(path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while answers:
            with contextlib.suppress(OSError):
                request(f"{url}/health")
                break
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.02)
        yield process, url
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
