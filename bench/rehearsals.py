"""The rehearsals of tests/slurm for benchmarks: the same runs on the same sandbox.

Belongs here: the way to them. Does not belong here: anything that measures.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_SLURM_TESTS = _TESTS / "slurm"
sys.path[:0] = [str(_TESTS), str(_SLURM_TESTS), str(_SLURM_TESTS / "faults")]

from rehearsal import MADE_UP as MADE_UP  # noqa: E402
from rehearsal import Rehearsal as Rehearsal  # noqa: E402
from rehearsal import Stage as Stage  # noqa: E402
from rehearsal import own_sandbox as own_sandbox  # noqa: E402
from rehearsal import patient_client as patient_client  # noqa: E402
from router_programs import haproxy as haproxy  # noqa: E402
from router_programs import vllm_router as vllm_router  # noqa: E402
from service_rehearsal import ServiceRehearsal as ServiceRehearsal  # noqa: E402
from serving_documents import service_plan as service_plan  # noqa: E402
from serving_environment import serving_python as serving_python  # noqa: E402
from terminal_screen import TerminalScreen as TerminalScreen  # noqa: E402

from hpctrain.sandbox.shape import default_shape  # noqa: E402


@contextmanager
def own_stage(grace_seconds: int = 6) -> Iterator[Stage]:
    """A fresh Slurm of four nodes and an empty directory of runs; both are gone afterwards."""
    shape = replace(default_shape(nodes=4), slurmd_timeout_seconds=10)
    brief = replace(shape.partitions[0], grace_seconds=grace_seconds)
    others = shape.partitions[1:]
    # The directory goes last: ranks write into it until the sandbox is down.
    with (
        tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name,
        own_sandbox(replace(shape, partitions=(brief, *others))) as sandbox,
    ):
        yield Stage(sandbox, Path(name))
