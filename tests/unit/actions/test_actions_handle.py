"""The Python API over the stand-in for Slurm."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

import hpctrain
from hpctrain.errors import NoSuchRunError, RunFailedError, UsageError
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState
from hpctrain.store.run_records import DoneMarker, write_record
from hpctrain.store.supervise_config import read_supervise_config

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt-tiny.yaml"


@pytest.fixture
def run(tmp_path: Path) -> hpctrain.Run:
    overrides = ["data.sources=[]", "data.tokenizer=null"]
    return hpctrain.submit(EXAMPLE, "sandbox", overrides, runs=tmp_path / "runs", slurm=FakeSlurm())


def test_a_submitted_run_can_be_opened_again(run: hpctrain.Run, tmp_path: Path) -> None:
    again = hpctrain.open_run("gpt-tiny", runs=tmp_path / "runs", slurm=run.slurm)
    assert again.run_id == run.run_id
    assert again.directory == run.directory
    assert run.state in (hpctrain.RunState.PENDING, hpctrain.RunState.RUNNING)
    assert run.story.attempts == ()
    with pytest.raises(NoSuchRunError):
        hpctrain.open_run("nobody", runs=tmp_path / "runs", slurm=run.slurm)


def test_wait_ends_with_the_run(run: hpctrain.Run) -> None:
    with pytest.raises(TimeoutError):
        run.wait(timeout_seconds=0.0)
    marker = DoneMarker(step=60, epoch=1, checkpoint="iter_0000060", time=time.time())
    write_record(run.files.layout.done, marker)
    assert run.wait(timeout_seconds=0.0).state is hpctrain.RunState.DONE


def test_wait_raises_for_a_run_that_will_never_be_done(run: hpctrain.Run) -> None:
    run.cancel()
    with pytest.raises(RunFailedError, match="CANCELLED"):
        run.wait(timeout_seconds=300.0)


def test_wait_asks_no_more_often_than_the_site_allows(run: hpctrain.Run) -> None:
    with pytest.raises(UsageError, match="asking Slurm every 1 s is too often") as caught:
        run.wait(poll_seconds=1.0)
    assert caught.value.hint == "the profile allows 10 s or more (`limits.poll`)"
    path = run.files.layout.supervise_config
    settings = read_supervise_config(path).model_copy(update={"poll_seconds": 60.0})
    path.write_text(settings.model_dump_json())
    with pytest.raises(UsageError, match="every 30 s is too often"):
        run.wait(poll_seconds=30.0)


def test_a_team_controls_a_run(run: hpctrain.Run) -> None:
    job = run.slurm.records[1]  # type: ignore[attr-defined]
    run.slurm.records[1] = replace(job, state=JobState.RUNNING)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        run.save(reason="first", timeout_seconds=0.0)
    assert "it saves" in run.stop(reason="second")
    assert run.resume().startswith("Withdrew")
    assert "waits in the queue" in run.hold() and run.why().requests[0].startswith("hold")
    assert [one.action for one in run.story.asked] == ["save", "stop", "take back", "hold"]
    assert run.checkpoints(verify=True).rows == ()


def test_a_plan_without_submitting() -> None:
    assert hpctrain.make_plan(EXAMPLE, "sandbox").layout.world_size == 4
    # Twice: the subpackages must not hide the function.
    assert hpctrain.make_plan(EXAMPLE, "sandbox", ["parallel.pp=1"]).layout.pp == 1
