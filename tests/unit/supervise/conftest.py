"""Short waits and signal handlers that do not outlive a test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervise_stage import Stage

from hpctrain.judge import policy
from hpctrain.judge.silence_limits import SilenceMonitor
from hpctrain.slurm.client import Backoff
from hpctrain.supervise import loop, timeouts
from hpctrain.supervise.act import successor
from hpctrain.supervise.evidence import launch_watch, slurm_facts


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(launch_watch, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(launch_watch, "_READ_SECONDS", 0.03)
    monkeypatch.setattr(launch_watch, "_LAST_WORDS_SECONDS", 60.0)
    monkeypatch.setattr(launch_watch, "_LEAVING_SECONDS", 60.0)
    monkeypatch.setattr(launch_watch, "_WRITE_SECONDS", 60.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(policy, "_SLOW_FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(loop, "_FAULT_PAUSE_SECONDS", 0.01)
    for module in (slurm_facts, successor, timeouts):
        monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(timeouts, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(Backoff, "next_seconds", lambda self: 0.02)


@pytest.fixture
def kept_signals() -> Iterator[None]:
    """The handlers and the mask of the test process, as they were."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def stage(
    tmp_path: Path, _short_waits: None, kept_signals: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    real = SilenceMonitor.sign

    def sign(self: SilenceMonitor, *words: Any) -> None:
        real(self, *words)
        stage.training_seen.set()

    monkeypatch.setattr(SilenceMonitor, "sign", sign)
    yield stage
    stage.close()
