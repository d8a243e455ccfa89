"""Checkpoints that are damaged, unfinished or have no room: never resumed from, never trusted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal import PlannedFault, Stage, held, waits_for
from slurm_settings import long_kill_wait
from survival import Fault, Survival, flip_a_byte

from hpctrain.checkpoints.publish import TRACKER_NAME, published_steps
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.manifest import checkpoint_name
from hpctrain.runs.state import RunState


@pytest.mark.stand_in
def test_damaged_and_unfinished_checkpoints_are_left_out(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    planned = (
        PlannedFault(epoch=1, rank=-1, step=55, do="die_of_term"),  # time for the last words
        *held(1, 55),
        PlannedFault(epoch=2, rank=0, do="die_unpublished", code=1),
    )
    rehearsal = stage.start("name=damaged", "checkpoint.keep=9", planned=planned)
    rehearsal.wait_for_checkpoint(50)
    rehearsal.wait_for_step(54)
    with long_kill_wait(stage.sandbox):
        rehearsal.sandbox.command("scontrol", "requeuehold", str(rehearsal.job_id))
        rehearsal.wait_until(lambda row: row.state is RunState.PENDING, "pending")
    root = rehearsal.run.layout.checkpoints
    damages = damage(root)
    rehearsal.sandbox.command("scontrol", "release", str(rehearsal.job_id))
    fault = Fault(30, f"the newest four checkpoints: {', '.join(damages.values())}")
    found = survival.recovered(rehearsal, fault, cause="requeued", action="leave", epoch=1)
    assert found.resumed_step == 10
    rejected = {
        event.checkpoint_step: event.reason or ""
        for event in rehearsal.events(EventKind.CHECKPOINT_REJECTED)
    }
    assert list(rejected) == list(damages), rehearsal.logs()
    assert "SHA-256" in rejected[50] and "__0_0.distcp" in rejected[50], rejected
    assert "__1_0.distcp" in rejected[40], rejected
    assert damages[30].removeprefix("no ") in rejected[30], rejected
    fault = Fault(31, "rank 0 dies between the last byte of a checkpoint and its publication")
    torn = survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=2)
    assert torn.resumed_step == 10, rehearsal.logs()
    rehearsal.assert_done_exactly(reference)


def damage(root: Path) -> dict[int, str]:
    """Four ways, each in one of the newest checkpoints; and a tracker that names none of them."""
    flip_a_byte(root / checkpoint_name(50) / "__0_0.distcp")
    shard = root / checkpoint_name(40) / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size // 2)
    names = {file.name for file in (root / checkpoint_name(30)).iterdir()}
    index = ".metadata" if ".metadata" in names else "common.pt"  # the stand-in has no index
    (root / checkpoint_name(30) / index).unlink()
    (root / checkpoint_name(20) / "manifest.json").write_text("{")
    (root / TRACKER_NAME).write_text("999999")
    return {
        50: "a flipped byte",
        40: "a truncated shard",
        30: f"no {index}",
        20: "half a manifest",
    }


def mount(place: Path, options: str) -> None:
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    subprocess.run(words, check=True, timeout=30)


@pytest.fixture
def small_disk(stage: Stage) -> Iterator[Path]:
    """A file system of its own with enough room; these tests run as root."""
    place = stage.directory / "small"
    place.mkdir()
    mount(place, "size=80M")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)


@pytest.mark.stand_in
def test_a_full_disk_stops_the_run_and_deletes_nothing(
    stage: Stage, small_disk: Path, survival: Survival
) -> None:
    """Others have filled it meanwhile: submitting a run for which it is too small is refused."""
    small = stage.at(small_disk)
    cache = stage.directory / "cache"  # larger than all checkpoints
    words = ("name=full", "checkpoint.keep=9", f"data.cache={cache}")
    rehearsal = small.start(*words, planned=waits_for("room", 15))
    rehearsal.wait_for_step(14)
    one = rehearsal.run.layout.checkpoints / checkpoint_name(10)
    room = 1.5 * sum(file.stat().st_size for file in one.iterdir())
    mount(small_disk, f"remount,size={shutil.disk_usage(small_disk).used + round(room)}")
    rehearsal.say("room")
    fault = Fault(29, "the file system of the checkpoints is full after the second one")
    # the stand-in writes no more than its records, which have no room either
    why = "No space left on device" if stage.stand_in else "no room for a checkpoint"
    survival.ended(rehearsal, fault, cause="disk_full", action="stop", why=why)
    published = published_steps(rehearsal.run.layout.checkpoints)
    assert published == ([10] if stage.stand_in else [10, 20])
