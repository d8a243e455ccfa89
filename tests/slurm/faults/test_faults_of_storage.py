"""The run directory is away, read-only, or without its ledger for a while: nothing is lost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rehearsal import STEPS, Rehearsal, Stage, held, waits_for
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import read_metrics

pytestmark = pytest.mark.stand_in

_AWAY_SECONDS = 5.0


@contextmanager
def away(rehearsal: Rehearsal) -> Iterator[None]:
    """The directory is moved aside, as if its file system were unmounted."""
    directory = rehearsal.run.layout.directory
    place = directory.with_name(f".{directory.name}.away")
    directory.rename(place)
    try:
        yield
        assert not directory.exists(), f"made anew: {sorted(directory.rglob('*'))}"
    finally:
        place.rename(directory)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """What is opened from now on cannot be written. Only root may do so."""
    bound = _mount("--bind", str(directory), str(directory))
    if bound.returncode != 0:
        pytest.skip(f"mounting needs privileges: {bound.stderr.strip()}")
    try:
        assert _mount("-o", "remount,bind,ro", str(directory)).returncode == 0
        with pytest.raises(OSError, match="Read-only file system"):
            (directory / "trial").touch()
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=30)


def _mount(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *words], capture_output=True, text=True, timeout=30)


@pytest.mark.variant("test_a_controller_that_is_away_disturbs_nothing")
def test_a_run_directory_that_is_away_for_seconds(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """First while the ranks train up to a save and beyond it, then while a launch ends."""
    rehearsal = stage.start("name=away", planned=(*waits_for("train", 13), *held(1, 33)))
    rehearsal.wait_for_step(12)
    with away(rehearsal):
        rehearsal.say("train")
        time.sleep(_AWAY_SECONDS)
    rehearsal.wait_for_step(32)
    assert rehearsal.epoch == 1 and not rehearsal.causes, rehearsal.logs()
    assert [row.step for row in read_metrics(rehearsal.run.layout)][:20] == [*range(1, 21)]
    survival.shown(
        Fault(54, "the run directory is moved away for 5 s, a save falls due meanwhile"),
        action="none: training goes on, the save waits",
    )
    with away(rehearsal):
        rehearsal.kill_rank(1)
        time.sleep(_AWAY_SECONDS)
    fault = Fault(54, "the run directory is moved away, and a rank dies meanwhile")
    survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=1)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 1, rehearsal.logs()
    assert len(read_metrics(rehearsal.run.layout)) == STEPS + 2, "no row is lost, none is doubled"


@pytest.mark.variant("test_a_controller_that_is_away_disturbs_nothing")
def test_a_run_directory_that_is_read_only_for_seconds(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    rehearsal = stage.start("name=readonly", planned=waits_for("train", 13))
    rehearsal.wait_for_step(12)
    with read_only(rehearsal.run.layout.directory):
        rehearsal.say("train")
        time.sleep(_AWAY_SECONDS)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["done"], rehearsal.logs()
    survival.shown(
        Fault(61, "the run directory is read-only for 5 s, a save falls due meanwhile"),
        action="none: training goes on, the save waits",
        identical=STEPS,
    )


@pytest.mark.variant("test_a_controller_that_is_away_disturbs_nothing")
def test_a_ledger_that_cannot_be_written_while_a_launch_ends(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """As any user can rehearse it: a directory is where the ledger was."""
    planned = (*held(1, 13), *waits_for("train", 23))
    rehearsal = stage.start("name=ledger", planned=planned)
    rehearsal.wait_for_step(12)
    ledger = rehearsal.run.layout.ledger
    kept = ledger.with_name("ledger.kept")
    ledger.rename(kept)
    ledger.mkdir()
    rehearsal.kill_rank(1)
    rehearsal.wait(
        lambda: any(
            row.epoch == 2 and row.step == 22 for row in read_metrics(rehearsal.run.layout)
        ),
        "training again without a ledger",
    )
    ledger.rmdir()
    kept.rename(ledger)
    rehearsal.wait(lambda: rehearsal.epoch == 2, "in the ledger again")
    rehearsal.say("train")
    fault = Fault(
        61, "the ledger cannot be written from before a rank dies until after the relaunch"
    )
    survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=1)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 1, rehearsal.logs()
    events = rehearsal.run.ledger.events()
    assert [event.time for event in events] == sorted(event.time for event in events)
    starts = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert [event.epoch for event in starts] == [1, 2]
    assert rehearsal.causes == ["crash", "done"]
