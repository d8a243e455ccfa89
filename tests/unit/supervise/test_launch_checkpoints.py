"""Checkpoints that are gone, or verify and cannot be loaded: what a launch does and never does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_evidence import config
from step_rows import trained_step
from supervise_stage import Stage
from trainer_documents import train_json

from hpctrain.base.errors import StorageError
from hpctrain.checkpoints.publish import Retention, published_steps
from hpctrain.judge import policy
from hpctrain.records.data_identity import (
    DataIdentity,
    compare,
    identify_file,
    read_identity,
    write_identity,
)
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.run_records import (
    SaveRecord,
    SkipList,
    append_metrics,
    append_save,
    read_record,
)
from hpctrain.supervise.act.execute import skip_batches
from hpctrain.supervise.srun_launch import Ended, TrainerLauncher

# -- gone --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Storage is asked again every half minute, which is not what is tested here."""
    monkeypatch.setattr(policy, "_SLOW_FIRST_DELAY_SECONDS", 0.01)
    yield


def resumed(stage: Stage) -> None:
    """A person wants the run to go on."""
    Ledger(stage.layout.ledger).append(EventKind.CONTROL, action="resume")


def test_emptied_checkpoints_stop_the_run(stage: Stage) -> None:
    """Scratch was purged between two attempts."""
    assert stage.play("save:20 progress:25 crash", "exit:0", "exit:0", "exit:0") == 1
    shutil.rmtree(stage.layout.checkpoints)
    stage.layout.checkpoints.mkdir()
    resumed(stage)
    assert stage.play("done", "done", "done", "done", "done") == 1
    stop = stage.events(EventKind.ACTION)[-1]
    assert (stage.causes[-1], stop.action) == ("bad_checkpoint", "stop")
    assert "holds no checkpoint" in str(stop.reason) and "step 20 (ledger.jsonl)" in str(
        stop.reason
    )
    assert "hpctrain resume --from-scratch" in str(stop.reason)
    assert not stage.layout.done.exists()


def test_the_saves_alone_are_enough(stage: Stage) -> None:
    save = SaveRecord(step=10, epoch=1, time=1.0, stall_seconds=0, publish_seconds=0, size_bytes=1)
    append_save(stage.layout, save)
    assert stage.play("done") == 1
    assert "step 10 (saves.jsonl)" in str(stage.events(EventKind.ACTION)[-1].reason)


def test_checkpoints_that_are_not_there_are_storage(stage: Stage) -> None:
    """Asked for again, within the budget of storage, and never taken for an empty directory."""
    stage.configure(config().model_copy(update={"budgets": {"storage": 2}}))
    stage.layout.checkpoints.rmdir()
    stage.layout.checkpoints.symlink_to("/not-mounted/checkpoints")
    assert stage.play("done") == 1
    assert stage.causes == ["storage"] * 3
    assert stage.actions == ["relaunch", "relaunch", "stop"]
    assert "the directory of checkpoints is not there" in str(
        stage.events(EventKind.ACTION)[-1].reason
    )


def test_checkpoints_that_come_back_are_resumed_from(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.configure(config().model_copy(update={"storm_failures": 100}))
    assert stage.play("save:20 progress:25 crash", "exit:0", "exit:0", "exit:0") == 1
    resumed(stage)
    away = stage.layout.directory / "away"
    stage.layout.checkpoints.rename(away)
    again = stage.supervisor("", "", "", "", "", "", "", "done", *["done"] * 3)
    real = TrainerLauncher._not_begun

    def not_begun(*words: Any) -> Ended:
        """Back as soon as the first launch has failed without them."""
        ended = real(*words)
        if away.exists():
            away.rename(stage.layout.checkpoints)
        return ended

    monkeypatch.setattr(TrainerLauncher, "_not_begun", not_begun)
    assert again.run() == 0
    assert "storage" in stage.causes
    assert stage.events(EventKind.LAUNCH_STARTED)[-1].resume_step == 20


def test_steps_that_no_checkpoint_holds_are_said_to_be_lost(stage: Stage) -> None:
    row = {"step": 7, "epoch": 1, "time": 1.0, "loss": 1.0, "loss_hex": "0x1p+0",
           "grad_norm": None, "learning_rate": 1.0, "step_seconds": 1.0, "tokens_per_second": 1.0,
           "mfu": None, "memory_bytes": 0, "consumed_samples": 7}  # fmt: skip
    stage.layout.metrics.write_text(json.dumps(row) + "\n")
    assert stage.play("done") == 0
    assert [event.reason for event in stage.events(EventKind.RESUME)] == [
        "fresh start: 7 steps that no checkpoint holds are trained again"
    ]


def test_an_accepted_loss_starts_at_step_0_once(stage: Stage) -> None:
    stage.configure(config().model_copy(update={"storm_failures": 99}))
    assert stage.play("save:20 progress:25 crash", "exit:0", "exit:0", "exit:0") == 1
    epoch = stage.events(EventKind.LAUNCH_ENDED)[-1].epoch
    ledger = Ledger(stage.layout.ledger)
    ledger.append(EventKind.FRESH_START_ACCEPTED, epoch=epoch, user="ada")
    ledger.append(EventKind.CONTROL, action="resume")
    assert stage.play(*[""] * 4, "save:5 crash", "save:10 done") == 0
    assert [e.resume_step for e in stage.events(EventKind.LAUNCH_STARTED)][-2:] == [0, 5]
    resume = stage.events(EventKind.RESUME)[-2]
    assert resume.reason == "fresh start, accepted by ada"
    kept = stage.layout.checkpoints / "quarantine/iter_0000020.reason"
    assert kept.read_text() == "ada had the run start at step 0\n"


def test_a_given_up_checkpoint_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    """Retention sees published directories only; quarantine is none of them."""
    (tmp_path / "quarantine/iter_0000020").mkdir(parents=True)
    assert published_steps(tmp_path) == [] and Retention(tmp_path).retire(1, None) == []
    assert (tmp_path / "quarantine/iter_0000020").is_dir()


# -- the whole way -----------------------------------------------------------------------------


def test_stepping_back_from_launch_to_launch(stage: Stage) -> None:
    stage.configure(config().model_copy(update={"storm_failures": 9}))
    parts = ["save:10 save:20 progress:25 crash", "unloadable:20", "unloadable:20", "done"]
    assert stage.play(*parts) == 0
    assert stage.causes == ["crash", "load_failed", "load_failed", "done"]
    starts = [event.resume_step for event in stage.events(EventKind.LAUNCH_STARTED)]
    assert starts == [0, 20, 20, 10]
    (event,) = stage.events(EventKind.CHECKPOINT_REJECTED)
    assert (event.checkpoint_step, event.cause) == (20, "load_failed")
    kept = stage.layout.checkpoints / "quarantine/iter_0000020"
    assert (kept / "shard").read_bytes() == b"weights"
    environment = json.loads((stage.layout.directory / "environment-4.json").read_text())
    assert environment["HPCTRAIN_PINNED_STEPS"] == "10"


def test_proof_of_a_rank_costs_one_launch(stage: Stage) -> None:
    parts = ["save:10 save:20 progress:25 crash", "changed:20", "done"]
    assert stage.play(*parts) == 0
    assert stage.causes == ["crash", "bad_checkpoint", "done"]
    starts = [event.resume_step for event in stage.events(EventKind.LAUNCH_STARTED)]
    assert starts == [0, 20, 10]
    reason = (stage.layout.checkpoints / "quarantine/iter_0000020.reason").read_text()
    assert "shard has other content than was written" in reason


def test_no_node_is_blamed_when_nothing_was_launched(stage: Stage, tmp_path: Path) -> None:
    book = tmp_path / "nodes.jsonl"
    changes = {"budgets": {"storage": 1}, "node_ledger": str(book), "cluster": "c"}
    stage.configure(config().model_copy(update=changes))
    stage.layout.checkpoints.rmdir()
    assert stage.play("done") == 1
    assert stage.causes == ["storage"] * 2
    assert not book.exists()


# -- Data that changed under a run: refused once it has trained on them, told before ------------


@pytest.fixture
def tokens(stage: Stage, tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"a" * 1000)
    write_identity(stage.layout.data_identity, DataIdentity(files=(identify_file(path),)))
    return path


def trained(stage: Stage) -> None:
    """As if an earlier attempt had got to a checkpoint."""
    ledger = Ledger(stage.layout.ledger)
    ledger.append(EventKind.LAUNCH_ENDED, cause="preempted", resume_step=0)
    row = (
        '{"step": 7, "epoch": 1, "time": 1, "loss": 1, "loss_hex": "0x1p+0", "grad_norm": null, '
        '"learning_rate": 1, "step_seconds": 1, "tokens_per_second": 1, "mfu": null, '
        '"memory_bytes": 0, "consumed_samples": 7}'
    )
    stage.layout.metrics.write_text(row + "\n")


def test_the_same_data_are_trained_on(stage: Stage, tokens: Path) -> None:
    trained(stage)
    assert stage.play("done") == 0


def test_changed_data_are_refused_before_anything_is_launched(stage: Stage, tokens: Path) -> None:
    trained(stage)
    tokens.write_bytes(b"b" * 1000)
    assert stage.play("done") == 1
    assert (stage.causes[-1], stage.actions) == ("data_changed", ["stop"])
    reason = str(stage.events(EventKind.ACTION)[-1].reason)
    assert f"{tokens} has the same size and other content" in reason
    assert "hpctrain resume r1 --accept-data" in reason
    assert not (stage.layout.directory / "srun.pid").exists()


def test_a_copy_of_the_data_is_the_same_data(stage: Stage, tokens: Path) -> None:
    trained(stage)
    os.utime(tokens, ns=(1, 1))
    assert stage.play("done") == 0
    identity = read_identity(stage.layout.data_identity)
    assert identity is not None and identity.files[0].mtime_ns == 1


def test_before_the_first_step_a_change_is_recorded_and_told(stage: Stage, tokens: Path) -> None:
    tokens.write_bytes(b"b" * 1000)
    assert stage.play("done") == 0
    assert "recorded anew" in str(stage.events(EventKind.OBSERVED)[0].reason)
    identity = read_identity(stage.layout.data_identity)
    assert identity is not None and not compare(identity).changed


def test_a_file_that_is_not_there_is_left_to_the_ranks(stage: Stage, tokens: Path) -> None:
    """They know whether it is missing on one node or on all."""
    trained(stage)
    tokens.unlink()
    assert stage.play("done") == 0


def test_a_damaged_record_is_no_consent(stage: Stage, tokens: Path) -> None:
    trained(stage)
    stage.layout.data_identity.write_text("{")
    assert stage.play("done") == 1
    assert "data.json is damaged" in str(stage.events(EventKind.ACTION)[-1].reason)


# -- Which samples are left out after going back ------------------------------------------------


BATCH = 8


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "r1")
    layout.create()
    layout.train_config.write_text(train_json(global_batch_size=BATCH))
    for step in range(1, 40):
        add_row(layout, step, step * BATCH)
    return layout


def add_row(run: RunLayout, step: int, consumed: int) -> None:
    append_metrics(run, trained_step(step, consumed_samples=consumed))


def skips(run: RunLayout) -> list[tuple[int, int]]:
    found = read_record(run.skips, SkipList)
    return [(one.from_samples, one.to_samples) for one in found.skips] if found else []


@pytest.mark.parametrize(
    ("step", "count", "expected"),
    [
        (33, 1, (32 * BATCH, 33 * BATCH)),
        (33, 3, (30 * BATCH, 33 * BATCH)),
        (1, 1, (0, BATCH)),
        (2, 5, (0, 5 * BATCH)),
    ],
)
def test_the_batches_up_to_the_anomaly(
    run: RunLayout, step: int, count: int, expected: tuple[int, int]
) -> None:
    skipped = skip_batches(run, step, count, "loss is NaN")
    assert skipped is not None and skipped.reason == "loss is NaN"
    assert skips(run) == [expected]


def test_smaller_batches_of_a_ramp_up_are_left_out_as_they_were(run: RunLayout) -> None:
    ramp = dict(global_batch_size=BATCH, rampup_batch_size=(2, 2, 12))  # 2, 2, 4, 6, 8
    run.train_config.write_text(train_json(**ramp))
    add_row(run, 2, 4)
    skip_batches(run, 4, 2, "loss is NaN")
    assert skips(run) == [(4, 14)]


def test_skips_add_up_and_the_newest_row_counts(run: RunLayout) -> None:
    skip_batches(run, 33, 1, "first")
    for step in (30, 31, 32):  # the same steps again, after going back
        add_row(run, step, step * BATCH + BATCH)
    skip_batches(run, 33, 1, "second")
    assert skips(run) == [(32 * BATCH, 33 * BATCH), (33 * BATCH, 34 * BATCH)]


@pytest.mark.parametrize("damage", ["no row", "no train.json", "bad train.json", "zero"])
def test_without_knowing_which_samples_nothing_is_left_out(run: RunLayout, damage: str) -> None:
    if damage == "no train.json":
        run.train_config.unlink()
    if damage == "bad train.json":
        run.train_config.write_text("{}")
    step = 99 if damage == "no row" else 33
    assert skip_batches(run, step, 0 if damage == "zero" else 1, "x") is None
    assert skips(run) == []


@pytest.mark.parametrize("content", ["", "[1]", '{"schema_version": 99, "skips": []}'])
def test_a_list_that_cannot_be_read_is_never_overwritten(run: RunLayout, content: str) -> None:
    run.skips.write_text(content)
    with pytest.raises(StorageError, match=r"skips\.json"):
        skip_batches(run, 33, 1, "loss is NaN")
    assert run.skips.read_text() == content
