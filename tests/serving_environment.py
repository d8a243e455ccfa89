"""Real engines for tests: the serving environment, made on first use, and engines in it.

Belongs here: having the environment made, and starting an engine by its contract on loopback. Does
not belong here: what is tested with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.free_ports import free_port
from hpctrain.serve.engines.contract import CpuEngine, EngineCommand, EngineStart, ServingEngine
from hpctrain.serve.engines.registry import SERVING_ENGINES, command_of
from hpctrain.serve.tiny_llama import TinyShape, write_tiny_llama
from hpctrain.spec.service import ServingEngineName

ROOT = Path(__file__).resolve().parents[1]
_SCRIPT = ROOT / "scripts" / "serving-environment"
_DIRECTORY = ROOT / ".venv" / "serving"
# sysexits.h, EX_UNAVAILABLE: PyPI cannot be reached, or has no wheel for this machine.
_UNAVAILABLE_EXIT_CODE = 69
_INSTALL_SECONDS = 1500.0
# vLLM imports for 20 seconds on an idle core, and for minutes on a busy one.
_READY_SECONDS = 420.0


def serving_python() -> Path:
    """The interpreter that has vLLM, vllm-router and `transformers serve`.

    HPCTRAIN_SERVING_ENVIRONMENT names one that is there already. Skips the test, with the reason in
    the summary, only where PyPI cannot be reached or has no such wheels. Whatever else is in the
    way fails it.
    """
    if given := os.environ.get("HPCTRAIN_SERVING_ENVIRONMENT"):
        return Path(given) / "bin" / "python"
    done = subprocess.run(
        ["sh", str(_SCRIPT), str(_DIRECTORY)],
        capture_output=True,
        text=True,
        timeout=_INSTALL_SECONDS,
    )
    if done.returncode == _UNAVAILABLE_EXIT_CODE:
        reason = done.stderr.rpartition("error: ")[2].strip()
        pytest.skip(f"NOT TRIED with real engines: {reason}")
    assert done.returncode == 0, done.stderr
    return _DIRECTORY / "bin" / "python"


def tiny_start(
    python: Path, model: Path, shape: TinyShape | None = None, **more: object
) -> EngineStart:
    """A start of the tiny Llama on loopback: fp32, because not every processor has AMX for bf16."""
    write_tiny_llama(model, shape)
    return EngineStart(
        python=str(python),
        model_path=str(model),
        served_name="tiny",
        host="127.0.0.1",
        port=free_port(),
        precision="fp32",
        cpu=CpuEngine(threads=1, kv_cache_gib=1),
        settings_path=str(model.parent / "engine.yaml"),
        **more,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class RunningEngine:
    """An engine that has answered its ready probe."""

    engine: ServingEngine
    start: EngineStart
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.start.host}:{self.start.port}"

    def status(self, path: str, headers: dict[str, str] | None = None) -> int:
        """The status of a GET; 0 if nobody answers."""
        request = urllib.request.Request(self.url + path, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return str(response.read().decode())


@contextmanager
def running_engine(
    name: ServingEngineName, start: EngineStart, directory: Path
) -> Iterator[RunningEngine]:
    """Start an engine as its contract says, wait until it is ready, and end all its processes."""
    command = command_of(name, start)
    environment = _environment(command, directory, start)
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.words,
            env=environment,
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = RunningEngine(SERVING_ENGINES[name], start, process, log)
    try:
        _wait_until_ready(running)
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _environment(command: EngineCommand, directory: Path, start: EngineStart) -> dict[str, str]:
    if command.settings is not None and start.settings_path is not None:
        Path(start.settings_path).write_text(command.settings)
    if command.model_link is not None:
        (directory / command.model_link).symlink_to(start.model_path)
    secrets = {name: Path(file).read_text().strip() for name, file in command.secret_files.items()}
    # What an engine takes from the shell of whoever runs the tests is not tested.
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR") if key in os.environ}
    return {**kept, **command.environment, **secrets}


def _wait_until_ready(running: RunningEngine) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while running.status(running.engine.ready_path) != 200:
        log = running.log.read_text(errors="replace")
        assert running.process.poll() is None, log[-4000:]
        assert time.monotonic() < deadline, log[-4000:]
        time.sleep(0.2)
