"""A newer Slurm than this distribution has, for what 23.02 to 26.05 do differently.

Belongs here: having it unpacked. Does not belong here: what is rehearsed on it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = "trixie"
DIRECTORY = ROOT / ".slurm" / SUITE
# 34 MB from the mirror that this machine installs from.
_PATIENCE_SECONDS = 300.0


def unpacked() -> Path:
    """The directory of Debian's newer Slurm, unpacked on first use.

    Skips the test where it cannot be had: no Debian, no network. The reason is in the summary.
    """
    argv = [str(ROOT / "scripts" / "slurm-from-debian"), SUITE, str(DIRECTORY)]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"NOT REHEARSED: no newer Slurm: {error}")
    if done.returncode != 0:
        pytest.skip(f"NOT REHEARSED: no newer Slurm: {done.stderr.strip()}")
    return DIRECTORY
