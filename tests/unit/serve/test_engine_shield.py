"""Signals of Slurm do not reach an engine, whatever its Python does; SIGINT does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
