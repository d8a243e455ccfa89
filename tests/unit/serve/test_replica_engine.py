"""An engine below its task: watched for its health, and shielded from signals of Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hpctrain.serve.replica.engine_process import (
    STUCK_SECONDS,
    EngineAnswers,
    EngineLoad,
    HealthWatch,
)

IDLE = EngineLoad(0, 10.0)


@dataclass
class Played(EngineAnswers):
    """An engine that answers as a test says; `canaries` counts the requests for a token."""

    ready: bool = True
    now: EngineLoad | None = IDLE
    wrong: str | None = None
    canaries: int = 0

    def is_ready(self) -> bool:
        return self.ready

    def load(self) -> EngineLoad | None:
        return self.now

    def canary(self, timeout_seconds: float) -> str | None:
        self.canaries += 1
        return self.wrong


def watched(watch: HealthWatch, seconds: float, begin: float = 0.0) -> str | None:
    """Look every two seconds for so long; the first problem."""
    looks = (watch.problem(begin + 2.0 * count) for count in range(int(seconds / 2) + 1))
    return next((problem for problem in looks if problem is not None), None)


def test_three_failed_checks_are_too_many_and_one_is_doubtful() -> None:
    played = Played()
    watch = HealthWatch(played, 2.0, 60.0)
    assert watch.problem(0.0) is None and not watch.doubtful
    played.ready = False
    assert watch.problem(2.0) is None and watch.doubtful
    played.ready = True
    assert watch.problem(4.0) is None and not watch.doubtful
    played.ready = False
    found = [watch.problem(at) for at in (6.0, 7.0, 8.0, 10.0)]
    assert found == [None, None, None, "3 health checks in a row have failed"]


def test_an_engine_that_computes_makes_tokens() -> None:
    played = Played(now=EngineLoad(4, 10.0))
    problem = watched(HealthWatch(played, 2.0, 60.0), STUCK_SECONDS + 10)
    assert problem is not None and "4 requests are in flight, and no token" in problem
    assert played.canaries == 0, "a busy engine is not asked for more"


def test_an_idle_engine_is_asked_for_a_token_now_and_then() -> None:
    played = Played()
    watch = HealthWatch(played, 2.0, 60.0)
    assert watched(watch, 200.0) is None and played.canaries == 3
    played.wrong = "a request for one token got HTTP 500"
    problem = watched(watch, 100.0, begin=202.0)
    assert problem == "the engine is idle, and a request for one token got HTTP 500"


def test_an_engine_without_metrics_is_asked_too() -> None:
    played = Played(now=None)
    assert watched(HealthWatch(played, 2.0, 60.0), 130.0) is None and played.canaries == 2


# As multiprocessing does before it starts its first process.
_MASK = """
import signal, sys
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
signal.pthread_sigmask(signal.SIG_SETMASK, [])
still = signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(*(name for name in ("SIGTERM", "SIGUSR2", "SIGINT") if getattr(signal, name) in blocked))
print(*(name for name in ("SIGTERM", "SIGUSR2", "SIGINT") if getattr(signal, name) in still))
"""


def shielded(directory: Path, code: str, **variables: str) -> str:
    """What a Python prints that is started behind the shield."""
    shield = (sys.executable, "-m", "hpctrain.serve.replica.shield", str(os.getpid()))
    directory.mkdir(exist_ok=True)
    found = subprocess.run(
        [*shield, sys.executable, "-c", code],
        env={**os.environ, **variables, "HPCTRAIN_SHIELD": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return found.stdout


def test_multiprocessing_does_not_open_it(tmp_path: Path) -> None:
    lines = shielded(tmp_path / "shield", _MASK).splitlines()
    assert lines == ["SIGTERM SIGUSR2", "SIGTERM SIGUSR2"]


def test_what_a_site_does_at_the_start_of_python_is_done_too(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('of the site')\n")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    code = "import sitecustomize; print(sitecustomize.__file__)"
    lines = shielded(tmp_path / "shield", code, PYTHONPATH=path).splitlines()
    # Once when the shield itself starts, and once when the engine does.
    assert lines[-2:] == ["of the site", str(tmp_path / "site" / "sitecustomize.py")]
