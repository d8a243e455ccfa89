"""The interpreter that has Ray, in an environment of its own that is made on first use.

Belongs here: having it made. Does not belong here: what is tested with it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_DIRECTORY = ROOT / ".venv" / "ray"
_PINNED = ROOT / "constraints-ray.txt"
_INSTALL_SECONDS = 600.0
_UNREACHABLE = ("No matching distribution", "NewConnectionError", "NameResolutionError")


def ray_python() -> Path:
    """Have Ray installed, and return its interpreter.

    HPCTRAIN_RAY_ENVIRONMENT names an environment that is there already. Skips the test where PyPI
    cannot be reached or has no such wheel; whatever else is in the way fails it.
    """
    if given := os.environ.get("HPCTRAIN_RAY_ENVIRONMENT"):
        return Path(given) / "bin" / "python"
    python, stamp = _DIRECTORY / "bin" / "python", _DIRECTORY / "installed"
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (_DIRECTORY / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_bytes() != _PINNED.read_bytes():
            venv.create(_DIRECTORY, with_pip=True)
            words = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
            done = subprocess.run(
                [*words, "--disable-pip-version-check", "-r", str(_PINNED)],
                capture_output=True,
                text=True,
                timeout=_INSTALL_SECONDS,
            )
            if any(sign in done.stderr for sign in _UNREACHABLE):
                pytest.skip(f"NOT TRIED with Ray: {done.stderr.strip().splitlines()[-1]}")
            assert done.returncode == 0, done.stderr
            stamp.write_bytes(_PINNED.read_bytes())
    return python
