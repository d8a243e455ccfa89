"""A real Prometheus for tests, unpacked from Debian's packages on first use.

Belongs here: having it fetched. Does not belong here: what is tested with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.sandbox.debian import PrometheusPrograms, fetch_prometheus

_CACHE = Path(__file__).resolve().parents[1] / ".slurm" / "prometheus"


def fetched_prometheus() -> PrometheusPrograms:
    """The programs, with promtool.

    Skips the test, with the reason in the summary, only where the mirror cannot be reached.
    Whatever else is in the way fails it.
    """
    try:
        return fetch_prometheus(_CACHE)
    except SlurmUnreachableError as error:
        pytest.skip(f"NOT TRIED with Prometheus: {error}")
