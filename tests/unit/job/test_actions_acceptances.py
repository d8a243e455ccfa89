"""What a person accepts when a run goes on: only what there is to accept, and never unrecorded."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, published, said
from token_files import write_tokens

from hpctrain.base.errors import InvalidInputError, UsageError
from hpctrain.engines.train_json import parse_train_config
from hpctrain.job.data_records import identity_of, record_data
from hpctrain.job.prepare import prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.job.submit import submit
from hpctrain.records.data_identity import compare, read_identity
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.find import RunFiles
from hpctrain.records.known_steps import fresh_start_pending
from hpctrain.records.ledger import EventKind
from hpctrain.runs import control
from hpctrain.runs.control import Acceptance, accept
from hpctrain.runs.describe import request_history
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

ROOT = Path(__file__).resolve().parents[3]
ME = pwd.getpwuid(os.getuid()).pw_name
SCRATCH, DATA = Acceptance(from_scratch=True), Acceptance(data=True)
FAILED = [*SUBMITTED, STARTED, LAUNCHED, *ended("bad_checkpoint", "none is left", "stop")]


@pytest.fixture
def slurm() -> FakeSlurm:
    fake = FakeSlurm()
    fake.submit("#!/bin/sh\n")
    fake.records[1] = replace(fake.records[1], state=JobState.FAILED)
    return fake


# -- a start at step 0 -------------------------------------------------------------------------


def test_a_start_at_step_0_is_recorded_with_what_it_costs(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = fabricate(tmp_path, entries=FAILED, steps=23)
    claim_epoch(run.layout.epochs, "test")
    answer = control.resume(run, slurm, reason="scratch was purged", acceptance=SCRATCH)  # type: ignore[arg-type]
    assert "30 steps are given up" in answer.message and "as job 2" in answer.message
    (event,) = [e for e in run.ledger.events() if e.event is EventKind.FRESH_START_ACCEPTED]
    assert (event.user, event.reason, event.epoch) == (ME, "scratch was purged", 1)
    assert event.last_step == 30
    assert fresh_start_pending(run.ledger.events())
    story = request_history(run.ledger.events(), [])[0]
    assert (story.action, story.answer) == ("resume --from-scratch", "30 steps given up")


def test_nobody_gives_up_a_good_checkpoint(tmp_path: Path) -> None:
    entries = [*SUBMITTED, STARTED, LAUNCHED, *ended("crash", "ValueError", "stop")]
    run = fabricate(tmp_path, entries=entries)
    published(run, 10)
    with pytest.raises(UsageError, match="has a good checkpoint of step 10"):
        accept(run, SCRATCH, "")
    assert not fresh_start_pending(run.ledger.events())


def test_one_that_cannot_be_loaded_may_be_given_up(tmp_path: Path) -> None:
    run = fabricate(
        tmp_path, entries=[*SUBMITTED, STARTED, LAUNCHED, *ended("load_failed", "KeyError", "stop")]
    )
    published(run, 10)
    assert "starts at step 0" in accept(run, SCRATCH, "")[0]
    assert (run.layout.checkpoints / "iter_0000010").is_dir(), "the launch puts it aside"


def test_one_that_was_given_up_already_does_not_stand_in_the_way(tmp_path: Path) -> None:
    given_up = said(EventKind.CHECKPOINT_REJECTED, checkpoint_step=10, reason="a digest differs")
    entries = [*SUBMITTED, STARTED, LAUNCHED, *ended("crash", "x", "stop"), given_up]
    run = fabricate(tmp_path, entries=entries)
    published(run, 10)
    accept(run, SCRATCH, "")


def test_without_steps_there_is_nothing_to_give_up(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has not trained a step"):
        accept(fabricate(tmp_path), SCRATCH, "")


def test_a_directory_that_is_not_mounted_is_not_given_up(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=FAILED, steps=3)
    run.layout.checkpoints.rmdir()
    run.layout.checkpoints.symlink_to("/not-mounted/checkpoints")
    with pytest.raises(UsageError, match="leads to /not-mounted/checkpoints, which is not there"):
        accept(run, SCRATCH, "")
    run.layout.checkpoints.unlink()
    accept(run, SCRATCH, "")
    assert run.layout.checkpoints.is_dir(), "one that somebody deleted is made again"


def test_a_run_in_the_queue_goes_on_as_it_is(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = fabricate(tmp_path, entries=[*SUBMITTED, STARTED, LAUNCHED], steps=3)
    slurm.records[1] = replace(slurm.records[1], state=JobState.RUNNING)
    with pytest.raises(UsageError, match="has a job in the queue"):
        control.resume(run, slurm, acceptance=SCRATCH)  # type: ignore[arg-type]


# -- data --------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """A run of the tiny example on a dataset of a few bytes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_tokens(tmp_path / "data/text")
    (tmp_path / "data/tokenizer.json").write_text("{}")
    prepared = prepare(ROOT / "examples/gpt-tiny.yaml", "sandbox", runs=tmp_path / "runs")
    run = RunFiles(write_run_directory(prepared, tmp_path / "runs"))
    record_data(run.layout)
    return run


def test_what_a_run_reads_is_recorded_at_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_tokens(tmp_path / "data/text")
    (tmp_path / "data/tokenizer.json").write_text("{}")
    prepared = prepare(ROOT / "examples/gpt-tiny.yaml", "sandbox", runs=tmp_path / "runs")
    submitted = submit(prepared, tmp_path / "runs", FakeSlurm())  # type: ignore[arg-type]
    identity = read_identity(submitted.directory / "data.json")
    assert identity is not None
    names = {Path(file.path).name for file in identity.files}
    assert {"text.bin", "text.idx"} <= names
    assert all(Path(file.path).is_absolute() for file in identity.files)


def test_accepted_data_are_recorded_anew(trained: RunFiles) -> None:
    (trained.layout.data_cache / "indexes").mkdir(parents=True)
    index = Path.cwd() / "data/text.idx"
    index.write_bytes(index.read_bytes()[::-1])
    words = accept(trained, DATA, "typos corrected")
    assert "continues with changed data" in words[0] and "text.idx" in words[0]
    (event,) = [e for e in trained.ledger.events() if e.event is EventKind.DATA_ACCEPTED]
    assert (event.user, event.reason) == (ME, "typos corrected")
    assert len(event.evidence) == 1 and "same size and other content" in event.evidence[0]
    identity = read_identity(trained.layout.data_identity)
    assert identity is not None and compare(identity).changed == ()
    assert not trained.layout.data_cache.exists(), "an index of the old data is of no use"
    with pytest.raises(UsageError, match="are as they were recorded"):
        accept(trained, DATA, "")


def test_a_run_of_an_older_version_gets_its_record(trained: RunFiles) -> None:
    trained.layout.data_identity.unlink()
    assert "nothing was recorded" in accept(trained, DATA, "")[0]
    assert read_identity(trained.layout.data_identity) is not None


def test_data_that_are_gone_cannot_be_accepted(trained: RunFiles) -> None:
    (Path.cwd() / "data/text.bin").unlink()
    (Path.cwd() / "data/text.idx").write_text("TEXT.idx")
    with pytest.raises(InvalidInputError, match=r"text\.bin: cannot be read: No such file"):
        accept(trained, DATA, "")


def test_a_dataset_of_arrays_and_a_folder_of_images(tmp_path: Path) -> None:
    from hpctrain.engines.native import NativeConfig

    (tmp_path / "set.npz").write_bytes(b"numbers")
    (tmp_path / "val/cat").mkdir(parents=True)
    (tmp_path / "val/cat/1.png").write_bytes(b"pixels")
    config = NativeConfig.model_construct(
        engine="fsdp",
        data_format="images",
        data_blend=((1.0, str(tmp_path / "set.npz")),),
        data_validation=str(tmp_path / "val"),
        tokenizer=None,
    )
    identity = identity_of(config)
    assert [Path(file.path).name for file in identity.files] == ["set.npz", "1.png"]
    assert [folder.images for folder in identity.folders] == [1]


def test_the_configuration_on_disk_is_what_is_read(trained: RunFiles) -> None:
    config = parse_train_config(trained.layout.train_config.read_bytes())
    assert identity_of(config) == read_identity(trained.layout.data_identity)
