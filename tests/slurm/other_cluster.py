"""A second Slurm with the same file system: the same directory of runs, the same job ids.

Belongs here: its jobs, and being a client of it. Does not belong here: rehearsals of runs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpctrain.sandbox.faults import raise_job_ids
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import SandboxShape, default_shape
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord

NAME = "elsewhere"
_PATIENCE_SECONDS = 300.0
# Jobs of one core that run at a time on two nodes of eight.
_ROOM = 12
_INNOCENT = "#!/bin/sh\n#SBATCH -N1 -J innocent -o /dev/null -t 60\nexec sleep 3600\n"


def other_shape() -> SandboxShape:
    """Two nodes of other names, and another ClusterName."""
    return replace(default_shape(nodes=2), cluster_name=NAME, node_prefix="e")


@dataclass(frozen=True)
class OtherCluster:
    """The second Slurm. Its job ids collide on request."""

    sandbox: Sandbox

    @property
    def name(self) -> str:
        return self.sandbox.shape.cluster_name

    @property
    def slurm(self) -> SlurmClient:
        return SlurmClient({**os.environ, **self.sandbox.environment()}, _PATIENCE_SECONDS)

    def innocent_job(self, job_id: int, *options: str) -> int:
        """A stranger's job with exactly this id, which runs until somebody ends it.

        `options` are sbatch's, such as `--hold`: a job that waits.
        """
        if int(self.slurm.config().get("NEXT_JOB_ID")) < job_id:
            raise_job_ids(self.sandbox, job_id)
        given = self.slurm.submit(_INNOCENT, options).job_id
        assert given == job_id, f"this cluster is at job {given} already, and {job_id} was wanted"
        wanted = "is_pending" if "--hold" in options else "is_running"
        # A change of the configuration while it starts would requeue it.
        self._wait_for(job_id, wanted)
        return given

    def take_id(self, job_id: int) -> bool:
        """A stranger's job with this id, unless the ids here have passed it: then False.

        The first ones run, later ones are held, so that there is always room for one that runs.
        """
        next_id = int(self.slurm.config().get("NEXT_JOB_ID"))
        if next_id > job_id:
            return False
        options = ["--hold"] if self._running() >= _ROOM else []
        self.innocent_job(job_id, *options)
        return True

    def _running(self) -> int:
        return len(self.sandbox.command("squeue", "--noheader", "--states=RUNNING").splitlines())

    def job(self, job_id: int) -> JobRecord | None:
        """What this cluster says of a job; None when it knows none of that id."""
        return self.slurm.show_job(job_id)

    def assert_untouched(self, job_id: int) -> None:
        """The stranger's job still runs or waits, unchanged."""
        found = self.job(job_id)
        assert found is not None and (found.state.is_running or found.state.is_pending), found
        assert (found.name, found.restart_count) == ("innocent", 0), found

    def _wait_for(self, job_id: int, state: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := self.job(job_id)) is None or not getattr(found.state, state):
            assert time.monotonic() < deadline, f"never {state}: {found}"
            time.sleep(0.1)


@contextlib.contextmanager
def client_of(sandbox: Sandbox) -> Iterator[None]:
    """What this process does with Slurm from now on, the command line included, it does there."""
    there = sandbox.environment()
    before = {name: os.environ.get(name) for name in there}
    os.environ.update(there)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
