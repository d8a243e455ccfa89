"""What clients meet: other clusters, jobs that nobody has recorded, a controller that is away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
from another_user import AnotherUser
from command_line import hpctrain
from other_cluster import OtherCluster, client_of
from rehearsal import (
    PATIENCE_SECONDS,
    PlannedFault,
    Rehearsal,
    Stage,
    held,
    wait_till_remembered,
)
from slurm_settings import long_kill_wait
from survival import Fault, Survival

from hpctrain.base.errors import SlurmUnreachableError, UsageError
from hpctrain.job.job_submission import resubmit
from hpctrain.job.prepare import prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import RunFiles, all_runs
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import cancel, resume, stop
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.runs.watch import watch
from hpctrain.sandbox import faults
from hpctrain.slurm.client import SlurmClient

pytestmark = pytest.mark.stand_in


def waiting_at(step: int) -> tuple[PlannedFault, ...]:
    """Rank 1 waits there until it is told to go on, after all checkpoints so far are published."""
    return (
        PlannedFault(epoch=1, rank=-1, step=step, do="settle"),
        PlannedFault(epoch=1, rank=1, step=step, do="await_word", text="go"),
    )


@pytest.mark.variant("test_a_job_whose_client_died_is_found")
def test_a_login_node_of_another_cluster_does_no_harm(
    stage: Stage,
    tmp_path: Path,
    reference: RunFiles,
    survival: Survival,
    other_cluster: OtherCluster,
) -> None:
    own = stage.at(tmp_path)
    rehearsal = own.start("name=clusters", planned=waiting_at(14))
    rehearsal.wait_for_step(13)
    job_id, run = rehearsal.job_id, rehearsal.run
    other_cluster.innocent_job(job_id)
    before = run.layout.ledger.read_bytes()
    with client_of(other_cluster.sandbox):
        for verb in (cancel, stop, resume, resubmit):
            with pytest.raises(UsageError, match="are on cluster `sandbox`, and this is cluster"):
                verb(run, SlurmClient())
        (row,) = statuses([run], SlurmClient())
        assert (row.state, row.reason) == (RunState.UNKNOWN, "its jobs are on cluster sandbox")
        assert row.job_id == job_id
        refused = hpctrain("cancel", run.run_id, "-y", "--runs", str(own.runs))
        assert refused.exit_code == 2 and "sandbox" in refused.stderr, refused.transcript()
        seen = watch(own.runs, SlurmClient(), act=True, grace_seconds=0)
        assert (seen.elsewhere, seen.seen, seen.complete) == (1, (), True), seen
    assert run.layout.ledger.read_bytes() == before, "somebody has written into the ledger"
    other_cluster.assert_untouched(job_id)
    rehearsal.wait_until(lambda row: row.state is RunState.RUNNING, "running")
    rehearsal.say("go")
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.epoch == 1
    words = "`cancel`, `stop`, `resume` and `status` where the job id is somebody else's"
    survival.shown(Fault(55, words), action="refused by the name of the cluster", identical=60)
    survival.shown(Fault(56, "`watch --act` there"), action="counts the run", identical=60)


@pytest.mark.variant("test_a_job_whose_client_died_is_found")
def test_a_job_that_was_started_by_hand_is_a_job_of_the_run(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    own = stage.at(tmp_path)
    # The second launch is held, too: it must not be done before somebody cancels it.
    planned = (*waiting_at(24), *held(2, 34, do="await_warning"))
    rehearsal = own.start("name=byhand", planned=planned)
    rehearsal.wait_for_step(23)
    first, run, slurm = rehearsal.job_id, rehearsal.run, rehearsal.slurm
    stage.sandbox.command("scontrol", "requeuehold", str(first))
    environment = {**os.environ, **stage.sandbox.environment()}
    answer = subprocess.run(
        ["sbatch", "--parsable", "job.sbatch"],
        cwd=run.layout.directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rehearsal.job_id = int(answer.stdout)
    rehearsal.wait_for_step(33, epoch=2)
    adopted = rehearsal.events(EventKind.ADOPTED)
    assert [(e.job_id, e.successor_of) for e in adopted] == [(rehearsal.job_id, first)]
    row = rehearsal.wait_until(lambda row: row.state is RunState.RUNNING, "running")
    assert row.job_id == rehearsal.job_id

    with long_kill_wait(stage.sandbox):
        done = cancel(run, slurm)
        assert sorted(done.job_ids) == [first, rehearsal.job_id], done
        rehearsal.wait(lambda: not rehearsal.processes(), "ended")
    rehearsal.wait_until(lambda row: row.state is RunState.CANCELLED, "cancelled")
    jobs = (first, rehearsal.job_id)  # COMPLETING until slurmctld has heard of the end
    rehearsal.wait(lambda: all(job.state.is_ended for job in slurm.jobs(jobs).values()), "out")
    found = {job_id: job.state.name for job_id, job in slurm.jobs(jobs).items()}
    assert found == dict.fromkeys(jobs, "CANCELLED")
    epoch = rehearsal.epoch

    rehearsal.job_id = resubmit(run, slurm).job_id
    survival.recovered(
        rehearsal,
        Fault(57, "`scontrol requeuehold`, `sbatch job.sbatch` by hand, `cancel`, `resume`"),
        cause="cancelled",
        action="stop",
        epoch=epoch,
    )
    rehearsal.assert_done_exactly(reference)


def test_a_job_whose_client_died_is_found(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    """A client of the past: the line that says `submitted` is missing in the ledger."""
    own = stage.at(tmp_path)
    stage.fill()
    child = get_context("fork").Process(target=submit_and_die, args=(own,))
    child.start()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == -signal.SIGKILL
    (run,) = all_runs(own.runs)
    assert run.ledger.events()[-1].event is EventKind.SUBMITTING
    (row,) = statuses([run], stage.slurm)
    assert row.state is RunState.PENDING and row.job_id is not None
    rehearsal = Rehearsal(stage.sandbox, stage.slurm, run, row.job_id, own.directory / "orphan")
    with pytest.raises(UsageError, match=f"has job {row.job_id} in state PENDING"):
        resubmit(run, stage.slurm)
    adopted = rehearsal.events(EventKind.ADOPTED)
    assert [event.job_id for event in adopted] == [row.job_id], "healed by the verb that met it"
    cancel_fillers(stage)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 1
    words = "the client is killed between sbatch and its line in the ledger"
    survival.shown(Fault(58, words), action="found by its comment, recorded", identical=60)


class DeadlyStage(Stage):
    """`sbatch` does its work, and who called it is killed before it can write anything."""

    @property
    def slurm(self) -> SlurmClient:
        environment = {**os.environ, **self.sandbox.environment()}
        real = shutil.which("sbatch", path=environment["PATH"])
        shim = self.directory / "bin" / "sbatch"
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(f'#!/bin/sh\n{real} "$@"\nkill -9 $PPID\n')
        shim.chmod(0o755)
        environment["PATH"] = f"{shim.parent}{os.pathsep}{environment['PATH']}"
        return SlurmClient(environment)


def submit_and_die(stage: Stage) -> None:
    DeadlyStage(stage.sandbox, stage.directory, stage.stand_in).start("name=orphan")


def cancel_fillers(stage: Stage) -> None:
    stage.sandbox.command("scancel", "--partition=urgent", f"--user={os.getuid()}")


def test_nothing_is_said_to_be_cancelled_without_slurm(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    own = stage.at(tmp_path)
    rehearsal = own.start("name=away", planned=waiting_at(14))
    rehearsal.wait_for_step(13)
    run, slurm = rehearsal.run, rehearsal.slurm
    wait_till_remembered(stage.sandbox)
    faults.kill_controller(stage.sandbox)
    with pytest.raises(SlurmUnreachableError, match="was cancelled"):
        cancel(run, slurm)
    row = rehearsal.status()
    assert (row.state, row.state.over) == (RunState.UNKNOWN, False)
    faults.restart_controller(stage.sandbox)
    assert not rehearsal.events(EventKind.CANCEL_REQUESTED)
    rehearsal.say("go")
    rehearsal.assert_done_exactly(reference)
    words = "`cancel` while slurmctld is away; the run goes on"
    survival.shown(Fault(60, words), action="says that nothing was cancelled", identical=60)

    before = run.layout.ledger.read_bytes()
    with pytest.raises(UsageError, match="is done: there is nothing to cancel"):
        cancel(run, slurm)
    assert run.layout.ledger.read_bytes() == before
    words = "`cancel` of a run that is done"
    survival.shown(Fault(71, words), action="says so, writes nothing", identical=60)


def test_twenty_submits_at_once_are_twenty_runs(
    stage: Stage, tmp_path: Path, survival: Survival
) -> None:
    stage.fill()
    spec, profile = write_inputs(stage, tmp_path)
    prepared = prepare(spec, str(profile), ["name=many"], runs=tmp_path / "runs")
    with ThreadPoolExecutor(20) as pool:
        found = list(
            pool.map(lambda _: submit(prepared, tmp_path / "runs", stage.slurm), range(20))
        )
    rows = statuses(all_runs(tmp_path / "runs"), stage.slurm)
    assert len({one.run_id for one in found}) == len({row.job_id for row in rows}) == 20
    assert {row.state for row in rows} == {RunState.PENDING}
    comments = {job.comment for job in stage.slurm.jobs([one.job_id for one in found]).values()}
    assert comments == {f"hpctrain:{one.run_id}" for one in found}
    words = "twenty submits of one spec at once"
    survival.shown(Fault(69, words), action="twenty run directories, twenty jobs")


def write_inputs(stage: Stage, place: Path) -> tuple[Path, Path]:
    """The rehearsal's spec and profile, without submitting them."""
    rehearsal = stage.start("name=pattern")
    cancel(rehearsal.run, stage.slurm)
    assert rehearsal.place is not None
    for name in ("rehearsal.yaml", "profile.yaml"):
        shutil.copy(rehearsal.place / name, place / name)
    return place / "rehearsal.yaml", place / "profile.yaml"


@dataclass(frozen=True)
class StageElsewhere(Stage):
    """Its runs are below another directory."""

    elsewhere: Path = Path()

    @property
    def runs(self) -> Path:
        return self.elsewhere


@pytest.mark.variant("test_a_job_whose_client_died_is_found")
def test_a_path_that_slurm_reads_as_a_pattern(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    place = tmp_path / "100%j of\nit"
    rehearsal = StageElsewhere(stage.sandbox, tmp_path, stage.stand_in, place).start("name=percent")
    rehearsal.assert_done_exactly(reference)
    log = hpctrain("logs", rehearsal.run.run_id, "--runs", str(place))
    assert "the run is done" in log.stdout, log.transcript()
    words = "a run directory with `%j`, a blank and a line break in its path"
    survival.shown(Fault(70, words), action="trains", identical=60)

    refused = tmp_path / "back\\slash"
    with pytest.raises(UsageError, match="with a backslash"):
        StageElsewhere(stage.sandbox, tmp_path, stage.stand_in, refused).start("name=backslash")
    assert not all_runs(refused)
    survival.shown(Fault(70, "one with a backslash"), action="refused before the queue")


def test_a_colleague_sees_and_steers_what_was_shared(
    public_stage: Stage, another_user: AnotherUser, reference: RunFiles, survival: Survival
) -> None:
    """With exactly the two lines of the README's section Teams."""
    rehearsal = public_stage.start("name=shared", planned=waiting_at(14))
    rehearsal.wait_for_step(13)
    run, runs = rehearsal.run, str(public_stage.runs)
    ada = another_user.client_of(public_stage.sandbox)
    hidden = ada.hpctrain("status", "--runs", runs)
    assert hidden.exit_code == 0 and "1 run cannot be read" in hidden.stderr, hidden.transcript()
    listed = ada.hpctrain("status", "-a", "--runs", runs)
    assert listed.exit_code == 0 and "it belongs to" in listed.stdout, listed.transcript()
    for verb in ("describe", "stop", "why"):
        refused = ada.hpctrain(verb, run.run_id, "--runs", runs)
        assert refused.exit_code == 2 and "Permission denied" in refused.stderr

    directory = run.layout.directory
    share(another_user, directory, f"u:{ada.name}:rX,d:u:{ada.name}:rX", "-R")
    share(another_user, run.layout.control, f"u:{ada.name}:rwx,d:u:{ada.name}:rw")
    seen = ada.hpctrain("status", run.run_id, "--runs", runs)
    assert seen.exit_code == 0 and "RUNNING" in seen.stdout, seen.transcript()
    for verb in ("cancel", "resubmit"):
        refused = ada.hpctrain(verb, run.run_id, "-y", "--runs", runs)
        assert refused.exit_code == 2 and "which belongs to" in refused.stderr, refused.transcript()
    asked = ada.hpctrain("stop", run.run_id, "--reason", "lunch", "--runs", runs)
    assert asked.exit_code == 0, asked.transcript()
    rehearsal.say("go")
    row = rehearsal.wait_till_over()
    assert row.state is RunState.STOPPED and ada.name in row.reason, rehearsal.logs()

    rehearsal.job_id = resubmit(run, rehearsal.slurm).job_id
    rehearsal.assert_done_exactly(reference)
    for words in (("describe",), ("why",), ("logs",), ("logs", "--rank", "0"), ("goodput",)):
        told = ada.hpctrain(words[0], run.run_id, *words[1:], "--runs", runs)
        assert told.exit_code == 0, told.transcript()
        assert "cannot be read" not in told.stderr, told.transcript()
    everything = [path for path in directory.rglob("*") if "checkpoints" not in path.parts]
    closed = [path for path in everything if not another_user.call(os.access, path, os.R_OK)]
    assert not closed, "what the run wrote later is hidden"
    words = "a colleague without rights, then with the README's two lines: status, stop, logs"
    survival.shown(Fault(59, words), action="a row with its reason; asked, it stops", identical=60)


def share(user: AnotherUser, path: Path, rule: str, *options: str) -> None:
    user.allow(path, "x")  # skips where there are no ACLs
    subprocess.run(["setfacl", *options, "-m", rule, str(path)], check=True, timeout=60)
