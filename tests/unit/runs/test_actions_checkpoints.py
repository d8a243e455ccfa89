"""What is told about the checkpoints of a run, on real files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from fabricated_runs import NOW, STARTED, SUBMITTED, fabricate, published, said

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.discover import Verified
from hpctrain.checkpoints.publish import Retention, quarantine
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.job.prepare import prepare
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import (
    SaveRecord,
    SkipList,
    SkippedData,
    append_save,
    write_record,
)
from hpctrain.runs.checkpoint_list import CheckpointReport, SaveInterval, report_checkpoints

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt-tiny.yaml"


# 1000 s of training with one failure: that is the time between failures.
FAILED_ONCE = (
    said(EventKind.LAUNCH_STARTED, epoch=1, resume_step=0, time=NOW - 2000),
    said(EventKind.LAUNCH_ENDED, epoch=1, cause="crash", resume_step=0, time=NOW - 1000),
)


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """Good checkpoints of steps 10 to 50, steps of 2 s."""
    found = fabricate(tmp_path / "runs", entries=[*SUBMITTED, STARTED, *FAILED_ONCE], steps=53)
    for step in range(10, 60, 10):
        published(found, step, time=NOW - 600 + step)
    configure(found, keep_checkpoints=2, keep_every_steps=None)
    return found


@cache
def planned() -> MegatronConfig:
    overrides = ["data.sources=[]", "data.tokenizer=null"]
    return prepare(EXAMPLE, "sandbox", overrides, runs=Path("none")).train


def configure(run: RunFiles, **changes: object) -> None:
    """A trainer's file as `submit` writes it, with `changes`."""
    run.layout.train_config.write_text(planned().model_copy(update=changes).model_dump_json())


def saved(run: RunFiles, step: int, stall_seconds: float, publish_seconds: float = 4.0) -> None:
    append_save(
        run.layout,
        SaveRecord(
            step=step,
            epoch=1,
            time=NOW,
            stall_seconds=stall_seconds,
            publish_seconds=publish_seconds,
            size_bytes=1,
        ),
    )


def interval(run: RunFiles) -> SaveInterval:
    found = report_checkpoints(run, now=NOW).interval
    assert found is not None
    return found


def everything(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}


def test_newest_first_with_age_size_and_cost(run: RunFiles) -> None:
    saved(run, 50, 0.5, 3.0)
    seen = report_checkpoints(run, now=NOW)
    assert [row.step for row in seen.rows] == [50, 40, 30, 20, 10]
    first = seen.rows[0]
    assert (first.age_seconds, first.size_bytes, first.files) == (550.0, 1024, 1)
    assert (first.stall_seconds, first.publish_seconds) == (0.5, 3.0)
    assert (first.verified, first.problem, first.layout) == ("size", None, "tp 1 · pp 2 · dp 1")
    assert seen.rows[1].stall_seconds is None


def test_what_is_kept_and_why_agrees_with_what_retention_deletes(run: RunFiles) -> None:
    configure(run, keep_checkpoints=2, keep_every_steps=20)
    skip = SkippedData(from_samples=170, to_samples=180, reason="loss jumped", time=NOW)
    write_record(run.layout.skips, SkipList(skips=(skip,)))
    kept = {row.step: row.kept_because for row in report_checkpoints(run, now=NOW).rows}
    assert kept == {
        50: ("newest",),
        40: ("newest 2", "every 20 steps"),
        30: ("until the next save",),
        20: ("every 20 steps", "before data left out"),
        10: ("until the next save",),
    }
    doomed = [step for step, why in kept.items() if why == ("until the next save",)]
    assert Retention(run.layout.checkpoints).retire(2, 20, pinned={20}) == sorted(doomed)


def test_a_bad_one_is_found_by_reading_and_nothing_is_touched(run: RunFiles) -> None:
    shard = run.layout.checkpoints / "iter_0000050" / "shard.distcp"
    shard.write_bytes(b"x" * 1024)
    before = everything(run.layout.checkpoints)
    assert report_checkpoints(run, now=NOW).bad == (), "sizes do not show it"
    told: list[Verified] = []
    seen = report_checkpoints(run, verify=True, progress=told.append, now=NOW)
    assert [row.step for row in seen.bad] == [50]
    assert "SHA-256" in (seen.bad[0].problem or "")
    assert {row.verified for row in seen.rows} == {"sha256"}
    assert told[-1].files == told[-1].total_files == 5
    assert {row.step: row.kept_because for row in seen.rows}[40] == ("newest",)
    assert everything(run.layout.checkpoints) == before


def test_a_file_that_is_too_short_shows_without_reading(run: RunFiles) -> None:
    (run.layout.checkpoints / "iter_0000040" / "shard.distcp").write_bytes(b"x")
    (run.layout.checkpoints / "iter_0000030" / "manifest.json").unlink()
    bad = {row.step: row.problem or "" for row in report_checkpoints(run, now=NOW).bad}
    assert "1 bytes instead of 1024" in bad[40] and "did not finish" in bad[30]


def test_what_is_being_written_and_what_an_older_launch_left(run: RunFiles) -> None:
    for _ in range(2):
        claim_epoch(run.layout.epochs, "a test")
    for epoch, size in ((1, 100), (2, 200)):
        partial = run.layout.checkpoints / f"iter_0000060.partial-e{epoch:06d}"
        partial.mkdir()
        (partial / "shard").write_bytes(b"x" * size)
    found = {one.epoch: one for one in report_checkpoints(run).unfinished}
    assert (found[1].stale, found[1].size_bytes) == (True, 100)
    assert (found[2].stale, found[2].size_bytes) == (False, 200)
    assert found[2].changed_seconds_ago < 60
    assert [row.step for row in report_checkpoints(run).rows] == [50, 40, 30, 20, 10]


def test_quarantine_with_reasons(run: RunFiles) -> None:
    root = run.layout.checkpoints
    quarantine(root, root / "iter_0000050", "rolled back to step 40")
    moved = quarantine(root, root / "iter_0000040", "lost")
    moved.with_name(f"{moved.name}.reason").unlink()
    found = {one.name: one.reason for one in report_checkpoints(run).quarantined}
    assert found == {
        "iter_0000050": "rolled back to step 40",
        "iter_0000040": "no reason was written down",
    }


def test_how_many_more_fit(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_bavail, f_frsize = 10, 1000

    monkeypatch.setattr("hpctrain.runs.checkpoint_list.os.statvfs", lambda _: Disk)
    room = report_checkpoints(run).room
    assert (room.free_bytes, room.fits) == (10_000, 9)


def test_an_empty_run(tmp_path: Path) -> None:
    seen = report_checkpoints(fabricate(tmp_path))
    assert seen.rows == seen.unfinished == seen.quarantined == ()
    assert seen.interval is None and seen.room.fits is None


# -- the interval ------------------------------------------------------------------------------


def test_the_best_interval_is_dalys_for_what_was_measured(run: RunFiles) -> None:
    for step, stall in enumerate((9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 2.0, 2.0)):
        saved(run, step, stall)
    found = interval(run)
    assert found.stall_seconds == 2.0, "the median of the last five"
    assert found.mttf_seconds == 1000.0
    assert found.best_seconds == pytest.approx(daly_seconds(2.0, 1000.0))
    assert found.best_steps == round(daly_seconds(2.0, 1000.0) / 2.0)


def test_a_save_cannot_begin_before_the_last_one_counts(run: RunFiles) -> None:
    saved(run, 10, 0.1, publish_seconds=500.0)
    assert interval(run).best_seconds == 500.0


@pytest.mark.parametrize(
    ("every_steps", "advice"), [(1, "frequent"), (30, "good"), (500, "rare"), (None, "end only")]
)
def test_advice(run: RunFiles, every_steps: int | None, advice: str) -> None:
    """Daly's interval is 62 s here, 31 steps of 2 s."""
    configure(run, save_interval_steps=every_steps, save_interval_seconds=None)
    saved(run, 10, 2.0)
    found = interval(run)
    assert advice in found.advice
    assert found.used_seconds == (None if every_steps is None else every_steps * 2.0)


def test_whichever_of_steps_and_clock_comes_first(run: RunFiles) -> None:
    configure(run, save_interval_steps=100, save_interval_seconds=60.0)
    assert interval(run).used_seconds == 60.0
    configure(run, save_interval_steps=10, save_interval_seconds=60.0)
    assert interval(run).used_seconds == 20.0
    auto = {"save_interval_steps": None, "save_interval_auto": True}
    configure(run, save_interval_seconds=600.0, **auto)
    assert interval(run).used_seconds == 600.0, "nothing is measured yet"
    saved(run, 10, 2.0)
    found = interval(run)
    assert found.used_seconds == found.best_seconds and "(auto)" in found.advice


def test_nothing_measured_nothing_advised(run: RunFiles) -> None:
    found = interval(run)
    assert found.best_seconds is None and "nothing has been measured" in found.advice


def test_the_expected_failure_rate_is_used_before_the_first_failure(
    run: RunFiles, tmp_path: Path
) -> None:
    quiet = fabricate(tmp_path / "quiet")
    quiet.layout.train_config.write_bytes(run.layout.train_config.read_bytes())
    saved(quiet, 10, 2.0)
    assert interval(quiet).mttf_seconds is None
    config = json.loads(quiet.layout.supervise_config.read_text())
    quiet.layout.supervise_config.write_text(json.dumps({**config, "mttf_seconds": 5000.0}))
    assert interval(quiet).mttf_seconds == 5000.0


def test_shelf_survives_json(run: RunFiles) -> None:
    seen = report_checkpoints(run, now=NOW)
    assert CheckpointReport.model_validate_json(seen.model_dump_json()) == seen


def test_one_that_was_given_up_is_bad_until_it_is_put_aside(run: RunFiles) -> None:
    run.ledger.append(
        EventKind.CHECKPOINT_REJECTED, checkpoint_step=50, cause="load_failed", reason="KeyError"
    )
    seen = report_checkpoints(run, now=NOW)
    assert [(row.step, row.problem) for row in seen.bad] == [(50, "given up: KeyError")]
    run.ledger.append(EventKind.LAUNCH_STARTED, epoch=2, resume_step=40)
    quarantine(run.layout.checkpoints, run.layout.checkpoints / "iter_0000050", "KeyError")
    seen = report_checkpoints(run, now=NOW)
    assert seen.bad == () and seen.quarantined[0].reason == "KeyError"
    kept = {row.step: row.kept_because for row in seen.rows}
    assert kept[40] == ("newest", "loads, where a newer one was given up")


def test_a_directory_that_is_not_there(run: RunFiles) -> None:
    run.layout.checkpoints.rename(run.layout.directory / "away")
    with pytest.raises(CheckpointError, match="checkpoints is not there"):
        report_checkpoints(run, now=NOW)
