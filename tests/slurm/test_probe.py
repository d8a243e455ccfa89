"""The probe of nodes on a real Slurm: all well, a crash, a hang, a node that has left the job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal import PATIENCE_SECONDS, answer, patient_client, wait_till_remembered
from slurm_settings import lost_nodes_unnoticed

from hpctrain.judge.probe_results import ProbeResult
from hpctrain.sandbox import faults
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.slurm.states import JobState
from hpctrain.supervise.evidence.probe import STEP_NAME, PreflightOptions, probe_nodes

NODES = ("n0", "n1", "n2", "n3")
SCRIPT = "#!/bin/sh\n#SBATCH -N4 --no-kill --exclusive -t 60 -o /dev/null\nexec sleep 3600\n"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."


class Job:
    """A job on all nodes that outlives the loss of one."""

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self.environment = {
            **os.environ,
            **sandbox.environment(),
            "HPCTRAIN_KERNEL_LOG": f"{directory}/kernel-{{node}}",
        }
        self.slurm = patient_client(self.environment)
        self.directory = directory
        self.begun_at = time.time()
        self.job_id = self.slurm.submit(SCRIPT).job_id
        self.wait_until_nodes(4)

    def wait_until_nodes(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            job = answer(self.slurm, self.job_id)
            running = job is not None and job.state is JobState.RUNNING
            if running and len(self.slurm.hostnames((job and job.node_list) or "")) == count:
                return
            time.sleep(0.2)
        raise AssertionError(f"the job never has {count} nodes: {job}")

    def probe(self, deadline_seconds: float | None = None) -> ProbeResult:
        # not before: an earlier test may have rebooted a node
        question = PreflightOptions(self.directory, since=self.begun_at)
        return probe_nodes(
            self.slurm,
            self.job_id,
            NODES,
            question,
            deadline_seconds=deadline_seconds,
            environment=self.environment,
        )


@pytest.fixture
def job(sandbox: Sandbox, tmp_path: Path) -> Iterator[Job]:
    yield Job(sandbox, tmp_path)


def test_healthy_nodes_answer_at_once_and_tell_what_their_kernels_say(job: Job) -> None:
    (job.directory / "kernel-n1").write_text(f"usb 1-1: new device\n{XID}\n")
    result = job.probe(deadline_seconds=PATIENCE_SECONDS)
    assert result.usable == NODES, result
    assert (result.lost, result.broken, result.trouble) == ((), (), "")
    assert [(line.node, line.text) for line in result.kernel_lines] == [("n1", XID)]
    assert result.seconds < PATIENCE_SECONDS, "no deadline was waited for"
    assert not list(job.directory.glob(".preflight*")), "the trial files are gone"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(step.name == STEP_NAME for step in job.slurm.steps(job.job_id)):
        assert time.monotonic() < deadline, "the step of the probe never ends"
        time.sleep(0.2)


def test_a_node_that_cannot_write_is_broken_and_not_lost(job: Job) -> None:
    """A directory in the place of the trial file: this node alone cannot write there."""
    (job.directory / ".preflight-n2").mkdir()
    result = job.probe()
    assert (result.usable, result.lost) == (("n0", "n1", "n3"), ())
    assert [one.node for one in result.broken] == ["n2"]
    assert "run directory: cannot write" in result.problem_lines()[0]


def test_a_crashed_node_is_lost_before_and_after_slurm_notices(job: Job, sandbox: Sandbox) -> None:
    with lost_nodes_unnoticed(sandbox):
        faults.crash_node(sandbox, "n2")
        assert job.slurm.node_states(NODES)["n2"].is_down is False, "Slurm does not know it yet"
        result = job.probe()
    assert (result.lost, result.usable) == (("n2",), ("n0", "n1", "n3")), result
    assert "no answer" in result.why_lost[0]
    job.wait_until_nodes(3)
    again = job.probe()
    assert (again.lost, again.usable) == (("n2",), ("n0", "n1", "n3")), again
    assert "no answer" not in again.why_lost[0], "what Slurm says is down is not asked"


@pytest.mark.variant("test_a_crashed_node_is_lost_before_and_after_slurm_notices")
def test_a_hung_node_is_lost_at_the_deadline(job: Job, sandbox: Sandbox) -> None:
    faults.freeze_node(sandbox, "n3")
    result = job.probe(deadline_seconds=60)  # three nodes answer in a second
    assert (result.lost, result.usable) == (("n3",), ("n0", "n1", "n2")), result
    assert result.seconds < PATIENCE_SECONDS, "srun itself waits for ever"
    left = job.slurm.steps(job.job_id)
    assert {step.name for step in left if step.step_id.isdigit()} <= {STEP_NAME}


@pytest.mark.variant("test_a_crashed_node_is_lost_before_and_after_slurm_notices")
def test_without_a_controller_nobody_is_lost(job: Job, sandbox: Sandbox) -> None:
    wait_till_remembered(sandbox)
    faults.kill_controller(sandbox)
    result = job.probe()
    assert result.trouble and result.lost == ()
