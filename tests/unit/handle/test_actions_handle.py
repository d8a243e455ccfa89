"""The Python API over the stand-in for Slurm."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

import hpctrain
from hpctrain.base.errors import NoSuchRunError, RunFailedError, UsageError
from hpctrain.records.run_records import DoneMarker, write_record
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

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


@pytest.mark.parametrize(
    ("allowed", "wanted", "floor"), [(10.0, 1.0, "10 s"), (60.0, 30.0, "60 s")]
)
def test_wait_asks_no_more_often_than_the_site_allows(
    run: hpctrain.Run, allowed: float, wanted: float, floor: str
) -> None:
    path = run.files.layout.supervise_config
    settings = read_supervise_config(path).model_copy(update={"poll_seconds": allowed})
    path.write_text(settings.model_dump_json())
    words = f"asking Slurm every {wanted:g} s is too often"
    with pytest.raises(UsageError, match=words) as caught:
        run.wait(poll_seconds=wanted)
    assert caught.value.hint == f"the profile allows {floor} or more (`limits.poll`)"


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
