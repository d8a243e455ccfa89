"""The W&B run as segments, written by the real package and read back from its files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fabricated_runs import SUBMITTED, fabricate, said
from tracked_runs import WANDB, follow, loss_of, tracked, train
from wandb_files import history, run_records

from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.tracking import finished_segments, tracking_commands, unsynced_segments
from hpctrain.tracking.wandb_run import is_complete, run_is_over

WORDS = (sys.executable, "-P", "-m", "hpctrain.tracking", "--wandb", "--run-directory")


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = fabricate(tmp_path).layout
    tracked(layout, wandb=True)
    return layout


def write(run: RunLayout, *before: str) -> None:
    ended = subprocess.run(
        [*before, *WORDS, str(run.directory)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def end(run: RunLayout) -> None:
    """The supervisor stops the run for good."""
    Ledger(run.ledger).append(EventKind.ACTION, action="stop", reason="it is enough")


def all_rows(run: RunLayout) -> list[tuple[int, float]]:
    """All segments in the order in which `wandb sync` uploads them."""
    rows = [one for segment in finished_segments(run) for one in history(segment)]
    return [(one["_step"], one["train/loss"]) for one in rows]


def test_one_run_over_attempts_without_a_step_twice(run: RunLayout) -> None:
    train(run, range(1, 48), saved=[40])
    write(run)
    assert [step for step, _ in all_rows(run)] == [*range(1, 41)]
    train(run, range(41, 51), epoch=2)
    end(run)
    write(run)
    assert all_rows(run) == [(s, loss_of(s, 1 + (s > 40))) for s in range(1, 51)]
    first, second = finished_segments(run)
    (one,), (two,) = run_records(first), run_records(second)
    assert one.run_id == two.run_id == WANDB.run_id
    assert one.start_time.ToNanoseconds() < two.start_time.ToNanoseconds(), "the order of uploads"
    assert [one.project, one.display_name] == ["tests", "gpt-tiny-7f3a"]
    config = {item.key or item.nested_key[0]: item.value_json for item in one.config.update}
    assert config["gpus"] == "2"
    last = history(second)[-1]
    assert last["train/step"] == 50 and last["_timestamp"] == 1_750_002_050
    write(run)
    assert len(finished_segments(run)) == 2, "no rows, no segment"


def test_a_process_that_was_killed_leaves_no_part_of_a_segment(run: RunLayout) -> None:
    """Between the segment and its position, and in the middle of a segment."""
    train(run, range(1, 21), saved=[20])
    end(run)
    write(run)
    run.wandb_position.unlink()
    (run.wandb_unfinished / "offline-run-20260101_000000-half").mkdir(parents=True)
    write(run)
    assert [step for step, _ in all_rows(run)] == [*range(1, 21)]
    assert not run.wandb_unfinished.exists()


def test_no_network_is_touched_and_nothing_about_the_machine_is_told(
    run: RunLayout, tmp_path: Path
) -> None:
    train(run, range(1, 4))
    end(run)
    trace = tmp_path / "trace"
    home = tmp_path / "home"
    home.mkdir()
    strace = shutil.which("strace")
    assert strace, "strace is missing: `make install` installs it"
    network = ("--seccomp-bpf", "--follow-forks", "--trace=connect,sendto", f"--output={trace}")
    write(run, "env", f"HOME={home}", "WANDB_API_KEY=" + "0" * 40, strace, *network)
    calls = trace.read_text().splitlines()
    assert calls, "its parts talk with each other"
    assert not [call for call in calls if "AF_INET" in call and "127.0.0.1" not in call]
    assert not list(home.rglob("*")), "neither caches nor settings"
    (segment,) = finished_segments(run)
    assert not any(record.host or record.HasField("git") for record in run_records(segment))
    (file,) = segment.glob("*.wandb")
    told = file.read_bytes()
    for secret in ("0" * 40, sys.executable, str(run.directory), str(home)):
        assert secret.encode() not in told, secret
    modes = {path.name: path.stat().st_mode & 0o077 for path in run.tracking.rglob("*")}
    assert not any(modes.values()), modes


@pytest.mark.variant("test_one_run_over_attempts_without_a_step_twice")
def test_the_command_uploads_what_is_not_uploaded(run: RunLayout) -> None:
    assert tracking_commands(run) == []
    train(run, range(1, 4))
    end(run)
    write(run)
    assert tracking_commands(run) == [f"wandb sync {run.wandb}"]
    shown = subprocess.run(
        [str(Path(sys.executable).parent / "wandb"), "sync", "--dry-run", str(run.wandb)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "WANDB_ERROR_REPORTING": "false", "HOME": str(run.directory)},
    )
    assert "Would sync 1 run(s)" in shown.stderr, shown.stderr
    (segment,) = unsynced_segments(run)
    (segment / f"run-{WANDB.run_id}.wandb.synced").touch()
    assert tracking_commands(run) == []


@pytest.mark.variant("test_one_run_over_attempts_without_a_step_twice")
def test_the_follower_writes_what_is_left_at_the_end(run: RunLayout) -> None:
    train(run, range(1, 12), saved=[10])
    process = follow(run)
    process.communicate()
    assert process.returncode == 0
    assert [step for step, _ in all_rows(run)] == [*range(1, 11)]


@pytest.mark.parametrize(
    ("entries", "over"),
    [
        ((said(EventKind.SUBMITTED),), False),
        ((said(EventKind.ACTION, action="stop"),), True),
        ((said(EventKind.ACTION, action="requeue"),), False),
        ((*SUBMITTED, said(EventKind.ACTION, action="leave"), said(EventKind.CANCELLED)), True),
        ((said(EventKind.ACTION, action="hold"),), False),
        ((said(EventKind.ACTION, action="stop"), said(EventKind.SUBMITTED)), False),
    ],
)
def test_a_run_is_over_when_nothing_trains_it_further(
    tmp_path: Path, entries: tuple[tuple[EventKind, dict[str, object]], ...], over: bool
) -> None:
    assert run_is_over(fabricate(tmp_path, entries=entries).layout) is over
    assert run_is_over(fabricate(tmp_path, "gpt-done-7f3a", entries=entries, done=True).layout)


@pytest.mark.variant("test_one_run_over_attempts_without_a_step_twice")
def test_an_incomplete_file_of_the_package_is_noticed(run: RunLayout) -> None:
    """Its process may be killed, or find a full disk, and nobody is told."""
    train(run, range(1, 4))
    end(run)
    write(run)
    (segment,) = finished_segments(run)
    (file,) = segment.glob("*.wandb")
    whole = file.read_bytes()
    assert is_complete(file)
    for cut in (7, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert not is_complete(file)
