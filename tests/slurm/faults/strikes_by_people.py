"""Strikes by people: requests at bad moments, clients that die, users of other clusters.

What is typed here is what a user would type. Where the answer itself must be right, it is checked
here. Belongs here: verbs and sbatch by hand. Does not belong here: administrators
(see `strikes_at_machines`).
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from command_line import Outcome
from strikes_at_processes import rank_killed
from targets import DeedKind, Target

_SEEN_SECONDS = 240.0
_EVALUATION_SECONDS = 60.0
_BUG = "this is a bug of hpctrain"


# -- requests --------------------------------------------------------------------------------------


def stopped(target: Target) -> None:
    """By its owner, or by a colleague who touches the file; resumed when it has stopped."""
    _stop(target)
    _resume_when_over(target)


def stopped_in_an_evaluation(target: Target) -> None:
    target.until(lambda: target.progress().get("phase") == "evaluating", _EVALUATION_SECONDS)
    _stop(target)
    _resume_when_over(target)


def stopped_in_a_pause(target: Target) -> None:
    """Between a launch that has failed and the next one."""
    rank_killed(target)
    time.sleep(target.dice.uniform(0, 3))
    _stop(target)
    _resume_when_over(target)


def held(target: Target) -> None:
    with target.doing(DeedKind.HELD):
        _accepted(target, target.hpctrain("hold"))
        target.until(
            lambda: any(job.is_held for job in target.live_jobs()) or target.done, _SEEN_SECONDS
        )
        _resume(target)


def asked_to_save(target: Target) -> None:
    target.hpctrain("save")


def cancelled(target: Target) -> None:
    target.did(DeedKind.CANCELLED)
    _accepted(target, target.hpctrain("cancel", "-y"))


def cancelled_in_slurm(target: Target) -> None:
    target.did(DeedKind.CANCELLED)
    target.field.slurm("scancel", str(target.rehearsal.job_id))


def _stop(target: Target) -> None:
    target.did(DeedKind.STOPPED)
    if target.dice.random() < 0.5:
        (target.directory / "control" / "stop").touch()
    else:
        _accepted(target, target.hpctrain("stop"))


def _resume_when_over(target: Target) -> None:
    assert target.until(lambda: target.has_left() or target.done, _SEEN_SECONDS), (
        "it was asked to stop and does not"
    )
    _resume(target)


def _resume(target: Target) -> None:
    if not target.done:
        _accepted(target, target.hpctrain("resume"))
        target.did(DeedKind.RESUMED)


# -- submitting ---------------------------------------------------------------------------------


def submitted_by_hand(target: Target) -> None:
    """As the script says that one may; the job of before is held, and taken out later."""
    before = str(target.rehearsal.job_id)
    with target.doing(DeedKind.HELD):
        target.field.slurm("scontrol", "requeuehold", before)
        target.until(lambda: any(job.is_held for job in target.live_jobs()), _SEEN_SECONDS)
        with target.field.with_controller():
            script = target.directory / "job.sbatch"
            options = (f"--chdir={target.directory}",)
            target.rehearsal.job_id = target.rehearsal.slurm.submit(script, options).job_id
    target.aftercare.append(lambda: _take_out(target, before))


def _take_out(target: Target, job: str) -> None:
    target.field.slurm("scancel", job)


def client_killed_in_sbatch(target: Target) -> None:
    """Slurm has taken the job, and nobody lives to write down its id."""
    _stop(target)
    target.until(lambda: target.has_left() or target.done, _SEEN_SECONDS)
    if target.done:
        return
    target.did(DeedKind.RESUMED)
    answer = target.hpctrain("resume", path_first=_deadly_sbatch(target))
    if answer.exit_code != -signal.SIGKILL:
        target.wrong.append(f"the client outlived its sbatch: {answer}")
    if not target.live_jobs():
        target.wrong.append("sbatch of the client that died gave no job")


def _deadly_sbatch(target: Target) -> Path:
    """A directory whose sbatch is the real one and then kills whoever has called it."""
    real = shutil.which("sbatch", path=target.sandbox.environment()["PATH"])
    assert target.rehearsal.place is not None
    first = target.rehearsal.place / "deadly"
    first.mkdir(exist_ok=True)
    sbatch = first / "sbatch"
    sbatch.write_text(f'#!/bin/sh\n{real} "$@"\nkill -9 $PPID\n')
    sbatch.chmod(0o755)
    return first


# -- from elsewhere -----------------------------------------------------------------------------


def verbs_on_another_cluster(target: Target) -> None:
    """Typed where the job ids of this run are those of strangers."""
    before = _traces(target)
    there = target.field.other
    assert there is not None
    verb = target.dice.choice(("cancel", "resume", "hold"))
    answer = target.hpctrain(verb, *(["-y"] if verb == "cancel" else []), client=there.sandbox)
    if answer.exit_code == 0 and not target.done:
        target.wrong.append(f"`{verb}` on cluster {there.name} was not refused: {answer.stdout}")
    elif not target.done and target.sandbox.shape.cluster_name not in answer.stderr:
        target.wrong.append(f"`{verb}` on {there.name} does not name the cluster: {answer.stderr}")
    _nothing_has_changed(target, before, f"`{verb}` on cluster {there.name}")


def watch_on_another_cluster(target: Target) -> None:
    before = _traces(target)
    there = target.field.other
    assert there is not None
    answer = target.hpctrain("watch", "--act", "--grace", "0s", client=there.sandbox, run=False)
    if _BUG in answer.stderr:
        target.wrong.append(f"watch on another cluster: {answer.stderr}")
    _nothing_has_changed(target, before, f"`watch --act` on cluster {there.name}")


def _traces(target: Target) -> tuple[int, int]:
    """What verbs leave in the ledger: submissions, and requests of people."""
    kinds = [event.event.name for event in target.rehearsal.run.ledger.events()]
    return kinds.count("SUBMITTING"), kinds.count("CANCEL_REQUESTED")


def _nothing_has_changed(target: Target, before: tuple[int, int], what: str) -> None:
    if _traces(target) != before:
        target.wrong.append(f"{what} has left traces in the ledger")
    target.wrong += [f"{what}: {harm}" for harm in target.field.harmed_strangers()]


def status_of_another_user(target: Target) -> None:
    """Who may not read the runs gets a row for each, and no bug."""
    bystander = target.field.bystander
    assert bystander is not None
    with target.field.machines:  # one question at a time
        answer = bystander.hpctrain("status", "-a", "--runs", str(target.field.stage.runs))
    if answer.exit_code != 0 or _BUG in answer.stderr:
        target.wrong.append(f"status of another user: {answer.exit_code} {answer.stderr}")


def _accepted(target: Target, answer: Outcome) -> None:
    """A request may come when the run is just over; nothing else may fail."""
    if answer.exit_code != 0 and not target.done:
        words = " ".join(answer.arguments)
        target.wrong.append(f"`hpctrain {words}` failed with {answer.exit_code}: {answer.stderr}")
