"""The records that rungs share: the site, one check, and what has been measured.

Belongs here: those records, and running a program with a time limit. Does not belong here: any
check.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.records.gpu_report import CheckOutcome, KernelRates, RungCheck, StepTime
from hpctrain.records.software import SoftwareFacts
from hpctrain.records.speed_checks import SpeedCheck

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 1500  # characters of a program's output in a failed check


@dataclass(frozen=True)
class Site:
    """What the rungs run on.

    `profile` is the name or file of a cluster profile, `spec` the run of the rung of eight nodes.
    `emulated`: CPUs and gloo take the place of GPUs and NCCL. `directory` is where runs, logs and
    job scripts lie.
    """

    directory: Path
    gpus: int = 1
    profile: str | None = None
    spec: str | None = None
    emulated: bool = False
    submits: bool = True

    @property
    def device(self) -> str:
        return "cpu" if self.emulated else "cuda"


@dataclass
class Found:
    """What the checks have measured, for the report."""

    software: list[SoftwareFacts] = field(default_factory=list)
    speed: list[SpeedCheck] = field(default_factory=list)
    kernels: list[KernelRates] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)


@dataclass(frozen=True)
class Rung:
    """One rung. `send_back`: what its report contains, in words. `local`: it uses this machine."""

    number: int
    name: str
    title: str
    send_back: str
    run: Callable[[Site, Found], Iterator[RungCheck]]
    local: bool = True


class NotRunError(Exception):
    """A rung that cannot begin; the message names what is missing."""


@dataclass(frozen=True)
class Ended:
    """A program that has ended; `code` is None after its time limit."""

    code: int | None
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        limit = "no end within its time limit\n" if self.code is None else ""
        return limit + self.output[-_TAIL:].strip()


def passed(name: str, detail: str = "", seconds: float = 0.0) -> RungCheck:
    return RungCheck(name=name, outcome="passed", detail=detail, seconds=seconds)


def failed(name: str, detail: str, seconds: float = 0.0) -> RungCheck:
    return RungCheck(name=name, outcome="failed", detail=detail, seconds=seconds)


def not_run(name: str, reason: str) -> RungCheck:
    return RungCheck(name=name, outcome="not_run", detail=reason)


def outcome_of(checks: Sequence[RungCheck]) -> CheckOutcome:
    """Judge a rung: failed if one check is, not run if none was."""
    outcomes = {check.outcome for check in checks}
    if "failed" in outcomes:
        return "failed"
    return "passed" if "passed" in outcomes else "not_run"


def run_program(
    words: Sequence[str], limit_seconds: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run `python WORDS` from the root of the checkout, with stdout and stderr together."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output if isinstance(output, str) else output.decode(errors="replace")
        return Ended(None, text, limit_seconds)
    return Ended(done.returncode, done.stdout, time.monotonic() - start)
