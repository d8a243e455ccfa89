"""Slurms of other releases than this distribution has, for what they do differently.

Belongs here: having one fetched. Does not belong here: what is rehearsed on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.sandbox.debian import fetch_slurm

CACHE = Path(__file__).resolve().parents[2] / ".slurm"
NEWER = ("24.11", "26.05")


def fetched(release: str) -> Path:
    """The directory of this release, fetched on first use.

    Skips the test, with the reason in the summary, only where the mirror cannot be reached.
    Whatever else is in the way fails it.
    """
    try:
        return fetch_slurm(release, CACHE)
    except SlurmUnreachableError as error:
        pytest.skip(f"NOT REHEARSED on Slurm {release}: {error}")
