"""Which processes of a job are ranks, by the environments that three releases of Slurm give."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.sandbox.daemons import find_job_processes
from hpctrain.sandbox.paths import SandboxPaths

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(900)"]


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SandboxPaths]:
    """A process with the variables of `request.param`, in a job on node n0 of a sandbox."""
    paths = SandboxPaths(tmp_path, tmp_path)
    job = {"SLURM_CONF": str(paths.slurm_conf), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0"}
    process = subprocess.Popen(SLEEP, env=job | request.param, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield paths
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("started", "step_id", "rank"),
    [
        ({"SLURM_PROCID": "0"}, None, None),  # the batch step of 22.05 and 24.11
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "-5"}, None, None),  # that of 26.05
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "2"}, "2", 3),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "2", "RANK": "9"}, "2", 9),  # below an agent
    ],
    indirect=["started"],
)
def test_the_batch_step_is_no_rank(
    started: SandboxPaths, step_id: str | None, rank: int | None
) -> None:
    (found,) = find_job_processes(started, ("n0", "n1"))
    assert (found.job_id, found.node, found.step_id, found.rank) == ("7", "n0", step_id, rank)
    assert find_job_processes(started, ("n1",)) == ()
