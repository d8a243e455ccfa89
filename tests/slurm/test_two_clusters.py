"""What rehearsals of teams and of several clusters stand on: job ids that collide, a second user.

What hpctrain makes of it has rehearsals of its own (tests/slurm/faults).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from another_user import AnotherUser
from command_line import hpctrain
from other_cluster import OtherCluster, client_of
from rehearsal import Stage
from sleeping_jobs import QUIET, SLEEP, eventually, job_of

from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.slurm.client import SlurmClient


def test_the_same_job_id_is_another_job_on_another_cluster(
    stage: Stage, other_cluster: OtherCluster
) -> None:
    ours = stage.slurm.submit("#!/bin/sh\nsleep 600\n", ("-J", "ours", "-o", "/dev/null")).job_id
    other_cluster.innocent_job(ours)
    assert (stage.slurm.config().cluster_name, other_cluster.name) == ("sandbox", "elsewhere")
    found = [one.show_job(ours) for one in (stage.slurm, other_cluster.slurm)]
    assert [job and job.name for job in found] == ["ours", "innocent"]
    with client_of(other_cluster.sandbox):
        assert SlurmClient().config().cluster_name == "elsewhere"
        SlurmClient().cancel(ours)
    with pytest.raises(AssertionError):
        other_cluster.assert_untouched(ours)
    job = stage.slurm.show_job(ours)
    assert job is not None and not job.state.is_ended
    assert "SLURM_CONF" not in os.environ


def test_a_stranger_waits_as_well(stage: Stage, other_cluster: OtherCluster) -> None:
    job_id = stage.slurm.submit("#!/bin/sh\n", ("--hold",)).job_id
    other_cluster.innocent_job(job_id, "--hold")
    other_cluster.assert_untouched(job_id)


def test_another_user_has_jobs_of_their_own(public_stage: Stage, another_user: AnotherUser) -> None:
    sandbox: Sandbox = public_stage.sandbox
    them = another_user.client_of(sandbox)
    job_id = them.call(submit_a_sleep)
    assert eventually(lambda: not job_of(public_stage.slurm, job_id).state.is_pending)
    time.sleep(0.5)  # a script that its user may not run has ended long before
    answer = sandbox.command("squeue", "--noheader", f"--jobs={job_id}", "--format=%u %T")
    assert answer.split() == [another_user.name, "RUNNING"]
    mine = public_stage.slurm.submit("#!/bin/sh\nsleep 600\n", ("-o", "/dev/null")).job_id
    with pytest.raises(RuntimeError, match=r"^AccessDeniedError: .*denied"):
        them.call(SlurmClient.cancel, SlurmClient(them.environment), mine)


def submit_a_sleep() -> int:
    return SlurmClient().submit(SLEEP, QUIET).job_id


def test_another_user_reads_only_what_is_allowed(
    public_stage: Stage, another_user: AnotherUser
) -> None:
    closed = public_stage.directory / "closed"
    closed.mkdir(mode=0o700)
    (closed / "file").write_text("word")
    with pytest.raises(RuntimeError, match="PermissionError"):
        another_user.call(os.listdir, closed)
    another_user.allow(closed, "rx")
    assert another_user.call(os.listdir, closed) == ["file"]
    assert another_user.call(os.access, closed, os.W_OK) is False
    seen = another_user.hpctrain("profiles")
    assert (seen.exit_code, seen.stdout) == (0, hpctrain("profiles").stdout)


def test_another_user_has_no_way_back(another_user: AnotherUser) -> None:
    with pytest.raises(RuntimeError, match="PermissionError"):
        another_user.call(os.setuid, 0)
    word = another_user.call(subprocess.getoutput, "id -u")
    assert int(word) == another_user.account.pw_uid
    assert os.geteuid() == 0 and Path(sys.executable).exists()
