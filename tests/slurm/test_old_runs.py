"""A run that an earlier version has begun and stopped is resumed, and reaches its target."""

from __future__ import annotations

from pathlib import Path

import pytest
from old_runs import NOVEMBER_2026, STOPPED_STEP, TARGET_STEP, unpack
from rehearsal import Rehearsal, patient_client

from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import lineage, read_metrics
from hpctrain.runs.control import resume
from hpctrain.runs.state import RunState
from hpctrain.sandbox.sandbox import Sandbox


@pytest.mark.nightly("a real checkpoint of a former release is trained on")
def test_a_run_of_november_2026_is_resumed_from_its_checkpoint(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    run = unpack(NOVEMBER_2026, tmp_path)
    slurm = patient_client(sandbox.environment())
    answer = resume(run, slurm)
    assert answer.job_id is not None, answer
    resumed = Rehearsal(sandbox, slurm, run, answer.job_id)

    row = resumed.wait_till_over()

    assert row.state is RunState.DONE, resumed.logs()
    launched = resumed.events(EventKind.LAUNCH_STARTED)
    assert [event.resume_step for event in launched] == [0, 88, STOPPED_STEP]
    rows = lineage(read_metrics(run.layout))
    assert [row.step for row in rows] == list(range(1, TARGET_STEP + 1))
    assert {row.epoch for row in rows if row.step > STOPPED_STEP} == {3}
    # The weights were loaded: the model begins at 5.66 (ln 288), and was near 4.2 when it stopped.
    losses = [row.loss for row in rows]
    assert all(loss is not None and loss < 4.6 for loss in losses[STOPPED_STEP:]), losses
    assert published_steps(run.layout.checkpoints)[-1] == TARGET_STEP
