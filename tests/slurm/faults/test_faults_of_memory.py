"""What a run knows of its past: checkpoints that are gone or of no use, data that are others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from damaged_checkpoints import vouch
from rehearsal import STEPS, PlannedFault, Rehearsal, Stage, held
from slurm_settings import long_kill_wait
from survival import Fault, Survival, flip_a_byte
from token_files import write_tokens

from hpctrain.checkpoints.publish import QUARANTINE_NAME, TRACKER_NAME, published_steps
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.manifest import MANIFEST_NAME, checkpoint_name, read_manifest
from hpctrain.records.run_records import read_metrics
from hpctrain.runs import control
from hpctrain.runs.checkpoint_list import report_checkpoints
from hpctrain.runs.control import Acceptance
from hpctrain.runs.state import RunState


def held_at_the_end() -> tuple[PlannedFault, ...]:
    """The first launch stands at step 55, where a signal gives time for the last words."""
    return (PlannedFault(epoch=1, rank=-1, step=55, do="die_of_term"), *held(1, 55))


@pytest.mark.stand_in
def test_a_checkpoint_that_cannot_be_loaded_is_stepped_back_over(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    rehearsal = stage.start("name=hollow", "checkpoint.keep=9", planned=held_at_the_end())
    rehearsal.wait_for_checkpoint(50)
    rehearsal.wait_for_step(54)
    requeue(rehearsal)
    root = rehearsal.run.layout.checkpoints
    hold_nothing(root / checkpoint_name(50))
    release(rehearsal)
    again = survival.recovered(
        rehearsal,
        Fault(64, "a checkpoint whose digests are right cannot be loaded: once more"),
        cause="load_failed",
        action="relaunch",
        epoch=2,
        resumed_step=50,
    )
    assert again.end.resume_step == 50
    fault = Fault(64, "it cannot be loaded a second time: back to the one before")
    survival.recovered(
        rehearsal, fault, cause="load_failed", action="relaunch", epoch=3, resumed_step=40
    )
    rehearsal.assert_done_exactly(reference)
    assert rejections(rehearsal) == [(50, "load_failed")]
    assert (root / QUARANTINE_NAME / checkpoint_name(50) / "__0_0.distcp").exists()


@pytest.mark.variant("test_a_checkpoint_that_cannot_be_loaded_is_stepped_back_over")
def test_checkpoints_that_lie_are_stepped_back_over_and_kept(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """Only names and sizes are compared before a launch, as above 1 GiB."""
    words = ("name=given-up", "checkpoint.keep=9", "checkpoint.verify=size")
    rehearsal = stage.start(*words, planned=held_at_the_end())
    rehearsal.wait_for_checkpoint(50)
    rehearsal.wait_for_step(54)
    requeue(rehearsal)
    root = rehearsal.run.layout.checkpoints
    lose_an_entry(root / checkpoint_name(50))
    flip_a_byte(root / checkpoint_name(40) / "__1_0.distcp")
    release(rehearsal)

    fault = Fault(77, "the newest manifest lost the entry of a shard, and the shard is gone")
    survival.recovered(rehearsal, fault, cause="requeued", action="leave", epoch=1, resumed_step=40)
    fault = Fault(65, "a flipped byte in a shard, of which only the size was compared")
    found = survival.recovered(
        rehearsal, fault, cause="bad_checkpoint", action="relaunch", epoch=2, resumed_step=30
    )
    assert "__1_0.distcp has other content than was written" in (found.end.reason or "")
    rehearsal.assert_done_exactly(reference)

    assert rejections(rehearsal) == [(50, "bad_checkpoint"), (40, "bad_checkpoint")]
    kept = {one.name: one.reason for one in report_checkpoints(rehearsal.run).quarantined}
    assert set(kept) == {checkpoint_name(step) for step in (50, 40)}
    assert "lists" in kept[checkpoint_name(50)]


def rejections(rehearsal: Rehearsal) -> list[tuple[int | None, str | None]]:
    events = rehearsal.events(EventKind.CHECKPOINT_REJECTED)
    return [(event.checkpoint_step, event.cause) for event in events]


def requeue(rehearsal: Rehearsal) -> None:
    """Slurm takes the run off its nodes and holds it, so that there is time to do damage."""
    with long_kill_wait(rehearsal.sandbox):
        rehearsal.sandbox.command("scontrol", "requeuehold", str(rehearsal.job_id))
        rehearsal.wait_until(lambda row: row.state is RunState.PENDING, "pending")


def release(rehearsal: Rehearsal) -> None:
    rehearsal.sandbox.command("scontrol", "release", str(rehearsal.job_id))


def lose_an_entry(directory: Path) -> None:
    manifest = read_manifest(directory)
    assert manifest is not None
    lost = next(file for file in manifest.files if file.name.endswith(".distcp"))
    left = tuple(file for file in manifest.files if file != lost)
    text = manifest.model_copy(update={"files": left}).model_dump_json(indent=1)
    (directory / MANIFEST_NAME).write_text(text)
    (directory / lost.name).unlink()


def hold_nothing(directory: Path) -> None:
    """As if the shards had been written so."""
    for shard in directory.glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    vouch(directory)


@pytest.mark.stand_in
def test_emptied_checkpoints_never_start_a_run_at_step_0_unasked(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    planned = (PlannedFault(epoch=1, rank=-1, step=25, do="die_of_term"), *held(1, 25))
    rehearsal = stage.start("name=purged", planned=planned)
    rehearsal.wait_for_checkpoint(20)
    rehearsal.wait_for_step(24)
    requeue(rehearsal)
    root = rehearsal.run.layout.checkpoints
    for step in published_steps(root):
        shutil.rmtree(root / checkpoint_name(step))
    (root / TRACKER_NAME).unlink()
    release(rehearsal)
    fault = Fault(62, "scratch was purged: all checkpoints are gone, saves and ledger know of them")
    survival.ended(
        rehearsal, fault, cause="bad_checkpoint", action="stop", why="holds no checkpoint"
    )
    assert "step 20 (saves.jsonl)" in rehearsal.status().reason
    rows = read_metrics(rehearsal.run.layout)
    assert {row.epoch for row in rows} == {1}, "nothing was trained again"

    accepted = Acceptance(from_scratch=True)
    answer = control.resume(
        rehearsal.run, rehearsal.slurm, reason="scratch was purged", acceptance=accepted
    )
    assert answer.job_id is not None
    rehearsal.job_id = answer.job_id
    rehearsal.assert_done_exactly(reference)
    resumed = rehearsal.events(EventKind.RESUME)[-1]
    assert resumed.resume_step == 0 and "accepted by" in (resumed.reason or "")
    survival.shown(
        Fault(62, "a person accepts the loss with `hpctrain resume --from-scratch`"),
        action="resume",
        resumed_step=0,
        identical=STEPS,
    )


@pytest.mark.stand_in
def test_other_data_are_refused_until_they_are_accepted(stage: Stage, survival: Survival) -> None:
    prefix = stage.directory / "tokens"
    write_tokens(prefix)
    planned = (
        *(PlannedFault(epoch=0, rank=-1, step=step, do="die_of_term") for step in (15, 35)),
        *held(1, 15),
        *held(3, 35),
    )
    sources = f"data.sources=[{{path: {prefix}}}]"
    rehearsal = stage.start("name=other-data", sources, planned=planned)
    rehearsal.wait_for_step(14)
    requeue(rehearsal)
    write_tokens(prefix, seed=2)
    release(rehearsal)
    fault = Fault(66, "the tokens have other bytes, as many as before")
    survival.ended(
        rehearsal, fault, cause="data_changed", action="stop", why="same size and other content"
    )
    assert "--accept-data" in rehearsal.status().reason

    write_tokens(prefix)  # restored, at another time
    go_on(rehearsal)
    rehearsal.wait_for_step(34, epoch=3)
    survival.shown(
        Fault(66, "the tokens are restored, with another time"), action="resume", resumed_step=10
    )
    requeue(rehearsal)
    write_tokens(prefix, seed=2)
    release(rehearsal)
    row = rehearsal.wait_till_over()
    assert "same size and other content" in row.reason, rehearsal.logs()
    go_on(rehearsal, Acceptance(data=True))
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    (accepted,) = rehearsal.events(EventKind.DATA_ACCEPTED)
    assert "tokens.bin" in accepted.evidence[0] and accepted.reason == "on purpose"
    survival.shown(
        Fault(66, "a person accepts them with `hpctrain resume --accept-data`"),
        action="resume",
        resumed_step=30,
    )


def go_on(rehearsal: Rehearsal, acceptance: Acceptance | None = None) -> None:
    answer = control.resume(
        rehearsal.run, rehearsal.slurm, reason="on purpose", acceptance=acceptance
    )
    assert answer.job_id is not None
    rehearsal.job_id = answer.job_id
