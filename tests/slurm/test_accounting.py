"""What only a Slurm with slurmdbd does, and what the client makes of it."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rehearsal import PATIENCE_SECONDS, own_sandbox, patient_client
from sleeping_jobs import QUIET, SLEEP, eventually, job_of, running

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.sandbox.daemons import ACCOUNT
from hpctrain.sandbox.faults import set_option
from hpctrain.sandbox.processes import is_alive
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import default_shape
from hpctrain.site.job_limits import job_limits, qos_of
from hpctrain.slurm import JobState, SlurmClient, WaitReason
from hpctrain.slurm.cluster_queries import ClusterQueries

pytestmark = pytest.mark.nightly("newer releases of Slurm, which are fetched, with accounting")

# As free text may look: a value that a reader of Key=Value lines would take for Slurm's own.
HOSTILE = "JobState=RUNNING NodeAddr=10.9.8.7 BootTime=2001-01-01T00:00:00 NodeName=n3"


@pytest.fixture
def slurm(accounting: Sandbox) -> SlurmClient:
    return patient_client(accounting.environment())


@contextlib.contextmanager
def set_on(accounting: Sandbox, what: str, change: str, undo: str) -> Iterator[None]:
    """A limit that holds for a while: `what` names the entity of sacctmgr(1)."""
    words = ("-i", "modify", *what.split(), "set")
    accounting.command("sacctmgr", *words, change)
    try:
        yield
    finally:
        accounting.command("sacctmgr", *words, undo)


def test_what_has_ended_is_in_the_history(slurm: SlurmClient, accounting: Sandbox) -> None:
    """Its comment is there, too: by it a run knows its job."""
    assert slurm.accounting_enabled()
    name, comment = "a=b | c", "hpctrain:some-run"
    options = (*QUIET, f"--job-name={name}", f"--comment={comment}")
    job_id = slurm.submit("#!/bin/sh\nexit 3\n", options).job_id
    assert eventually(lambda: job_of(slurm, job_id).state.is_ended)
    assert eventually(lambda: job_id in slurm.past_jobs([job_id]))
    # slurmdbd 22.05 may get the end of a job before its name, which is `allocation` until then
    assert eventually(lambda: slurm.past_jobs([job_id])[job_id].name == name)
    assert eventually(lambda: slurm.past_jobs([job_id])[job_id].state is JobState.FAILED)
    past = slurm.past_jobs([job_id])[job_id]
    assert (past.exit_code, past.comment) == (3, comment)
    assert (past.account, past.source) == (ACCOUNT, "sacct")


def test_a_job_that_the_controller_has_forgotten_is_in_the_history_alone(
    slurm: SlurmClient, accounting: Sandbox
) -> None:
    job_id = slurm.submit("#!/bin/sh\n", QUIET).job_id
    assert eventually(lambda: job_of(slurm, job_id).state.is_ended)
    set_option(accounting, "MinJobAge", "2")
    try:
        assert eventually(lambda: slurm.jobs([job_id]) == {})
    finally:
        set_option(accounting, "MinJobAge", "300")
    assert slurm.history([job_id])[job_id].state is JobState.COMPLETED


@pytest.mark.variant("test_what_has_ended_is_in_the_history")
def test_a_sandbox_that_comes_up_again_has_its_history(accounting: Sandbox) -> None:
    """slurmctld would refuse a database that gives its cluster another id."""
    shape = replace(default_shape(nodes=1), accounting="slurmdbd")
    with own_sandbox(shape, accounting.state.slurm) as box:
        slurm = patient_client(box.environment())
        job_id = slurm.submit("#!/bin/sh\n", QUIET).job_id
        assert eventually(lambda: job_id in slurm.past_jobs([job_id]))
        database = [one for one in box.state.daemons if one.name in ("mariadbd", "slurmdbd")]
        assert len(database) == 2
        box.down(keep=True)
        assert not any(is_alive(one.identity) for one in database)
        box.up(PATIENCE_SECONDS)
        assert job_id in patient_client(box.environment()).past_jobs([job_id])
        assert box.health() == "up"


@pytest.mark.parametrize(
    ("what", "limit", "undo", "reason"),
    [
        (f"account {ACCOUNT}", "GrpTRES=gres/gpu=2", "GrpTRES=gres/gpu=-1", "AssocGrpGRES"),
        ("qos normal", "MaxJobsPerUser=0", "MaxJobsPerUser=-1", "QOSMaxJobsPerUserLimit"),
    ],
    ids=["of the account", "of the QOS"],
)
def test_a_job_that_a_limit_keeps_waiting_says_so(
    slurm: SlurmClient, accounting: Sandbox, what: str, limit: str, undo: str, reason: str
) -> None:
    with set_on(accounting, what, limit, undo):
        job_id = slurm.submit(SLEEP, (*QUIET, "--nodes=2", "--gres=gpu:2")).job_id
        assert eventually(lambda: job_of(slurm, job_id).wait is WaitReason.LIMIT)
        assert (job_of(slurm, job_id).reason or "").startswith(reason)
    assert eventually(lambda: job_of(slurm, job_id).state.is_running)


def test_limits_of_the_users_qos_are_read(accounting: Sandbox) -> None:
    """By their names in sacctmgr; those of a job, of a user, and the least."""
    user = getpass.getuser()
    change = (
        "MaxTRESPerJob=node=1,cpu=4 MinTRESPerJob=gres/gpu=2 MaxWall=04:00:00 Flags=DenyOnLimit"
    )
    accounting.command("sacctmgr", "-i", "add", "qos", "aaa", "MaxWall=00:10:00")
    accounting.command("sacctmgr", "-i", "add", "qos", "usual", *change.split())
    modify = ("sacctmgr", "-i", "modify", "user", user, "set")
    accounting.command(*modify, "qos=normal,aaa,usual", "defaultqos=usual")
    try:
        facts = ClusterQueries(user, accounting.environment()).facts()
    finally:
        accounting.command(*modify, "qos=normal", "defaultqos=normal")
        accounting.command("sacctmgr", "-i", "delete", "qos", "aaa", "usual")
    train = facts.partition("train")
    assert train is not None and facts.accounting is not None
    choice = qos_of(train, facts.accounting)
    assert choice is not None and (choice.name, choice.is_default) == ("usual", True)
    assert {*choice.usable} == {"normal", "aaa", "usual"}
    limits = job_limits(facts, train, "a100", 1)
    found = (limits.max_seconds, limits.max_nodes, limits.min_nodes)
    assert [one and one.value for one in found] == [4 * 3600, 1, 2]
    assert limits.others == (
        "MaxTRES cpu=4 of QOS usual: larger jobs wait, and no field of a profile says so",
    )
    (own,) = (one for one in facts.accounting.qos if one.name == "usual")
    assert "denyonlimit" in own.flags


def test_a_submission_beyond_a_limit_is_refused_with_slurms_words(
    slurm: SlurmClient, accounting: Sandbox
) -> None:
    limit, undo = "MaxSubmitJobsPerUser=0", "MaxSubmitJobsPerUser=-1"
    refused = pytest.raises(SlurmRefusedError, match="violates accounting/QOS policy")
    with set_on(accounting, "qos normal", limit, undo), refused:
        slurm.submit(SLEEP, QUIET)
    with pytest.raises(SlurmRefusedError, match="Invalid account"):
        slurm.submit(SLEEP, (*QUIET, "--account=nobodys"))


def test_free_text_in_answers_is_not_taken_for_slurms(
    slurm: SlurmClient, accounting: Sandbox
) -> None:
    accounting.command("scontrol", "update", "NodeName=n1", f"Comment={HOSTILE}")
    truth = slurm.boot_times(["n0", "n1"])
    assert set(truth) == {"n0", "n1"} and min(truth.values()) > 1e9
    assert slurm.node_address("n1") == "127.0.0.1"
    options = ("--hold", f"--comment={HOSTILE}", "--job-name=Reason=None", "--chdir=/tmp")
    job_id = slurm.submit(SLEEP, (*QUIET, *options)).job_id
    job = slurm.show_job(job_id)
    assert job is not None and job.state is JobState.PENDING
    assert (job.comment, job.name) == (HOSTILE, "Reason=None")
    assert (job.hold, job.work_directory) != (None, None)


def test_the_client_is_understood_by_this_slurm(slurm: SlurmClient, accounting: Sandbox) -> None:
    """One walk through what hpctrain asks of a Slurm, on a release that it does not come from."""
    assert slurm.config().version[:2] == accounting.state.version
    assert slurm.cluster_name() == "sandbox"
    answer = slurm.test_only(SLEEP, ["--nodes=2"])
    assert (answer.partition, answer.nodes) == ("train", "n[0-1]")
    assert answer.start_time_text is not None and answer.processors is not None
    held = slurm.submit(SLEEP, (*QUIET, "--hold")).job_id
    assert job_of(slurm, held).hold is not None
    slurm.cancel(held)
    job_id = running(slurm, "#!/bin/sh\nsrun sleep 3600\n", "--nodes=2", "--requeue")
    assert eventually(lambda: {one.step_id for one in slurm.steps(job_id)} == {"0", "batch"})
    job = slurm.show_job(job_id)
    assert job is not None and job.state.is_running and job.requeue and job.node_count == 2
    assert slurm.hostnames(job.node_list or "") == ("n0", "n1")
    assert {one.state for one in slurm.node_states(["n0", "n3"]).values()} <= {"mixed", "idle"}
    slurm.update_job(job_id, requeue=False)
    assert not slurm.requeue(job_id).will_run_again
    slurm.update_job(job_id, requeue=True)
    assert slurm.requeue_hold(job_id).will_run_again
    assert eventually(lambda: job_of(slurm, job_id).hold is not None)
    slurm.release(job_id)
    assert eventually(lambda: job_of(slurm, job_id).restart_count == 1)
    slurm.cancel(job_id)
    assert eventually(lambda: job_of(slurm, job_id).state is JobState.CANCELLED)
