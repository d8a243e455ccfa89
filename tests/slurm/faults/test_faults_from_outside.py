"""What only an onlooker can mend: `hpctrain watch`, one pass at a time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rehearsal import PATIENCE_SECONDS, Rehearsal, Stage, held
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.runs.watch import WatchPass, watch
from hpctrain.sandbox import faults

pytestmark = pytest.mark.stand_in


def look(rehearsal: Rehearsal, stage: Stage, *, act: bool) -> WatchPass:
    """One pass over the directory of this run alone."""
    found = watch(stage.runs, rehearsal.slurm, act=act, grace_seconds=0)
    rehearsal.job_id = [e.job_id for e in rehearsal.events(EventKind.SUBMITTED)][-1] or 0
    return found


@pytest.mark.variant("test_a_prolog_that_fails_is_left_behind")
def test_a_run_that_may_not_be_requeued_is_submitted_again(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    own = stage.at(tmp_path)
    rehearsal = own.start("name=orphan", continuation="none", planned=held(1, 14))
    epoch = rehearsal.wait_for_progress()
    faults.crash_node(stage.sandbox, rehearsal.nodes()[0])
    rehearsal.wait_till_over()
    before = look(rehearsal, own, act=False)
    assert [one.outcome for one in before.seen] == ["would"], before
    assert rehearsal.epoch == epoch, "a pass that only looks has done something"
    acted = look(rehearsal, own, act=True)
    assert [one.outcome for one in acted.seen] == ["done"], acted
    fault = Fault(15, "the batch node dies under a job that may not be requeued; `watch --act`")
    survival.recovered(
        rehearsal, fault, cause="node_failure", action="restarted by Slurm", epoch=epoch
    )
    rehearsal.assert_done_exactly(reference)


def break_known_prolog(stage: Stage, node: str) -> None:
    """Its slurmd reads the configuration later than slurmctld: wait until it runs a prolog."""
    noted = stage.directory / "noted"
    faults.break_prolog(stage.sandbox, node)
    script = stage.sandbox.directory / "prolog"
    script.write_text(f'#!/bin/sh\ntouch "{noted}"\n')
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not noted.exists():
        assert time.monotonic() < deadline, f"{node} never runs a prolog"
        run_to_its_end(stage, f"#!/bin/sh\n#SBATCH -w {node} -o /dev/null\ntrue\n")
    faults.break_prolog(stage.sandbox, node)


def run_to_its_end(stage: Stage, script: str) -> None:
    job_id = stage.slurm.submit(script).job_id
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (job := stage.slurm.show_job(job_id)) is not None and not job.state.is_ended:
        assert time.monotonic() < deadline, job
        time.sleep(0.1)


def test_a_prolog_that_fails_is_left_behind(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    own = stage.at(tmp_path)
    break_known_prolog(own, "n0")
    rehearsal = own.start("name=prolog")
    rehearsal.wait_until(lambda row: "held" in row.reason.lower(), "held by Slurm")
    acted = look(rehearsal, own, act=True)
    assert [one.outcome for one in acted.seen] == ["done"], acted
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.events(EventKind.LAUNCH_STARTED)[-1].epoch == 1
    survival.shown(
        Fault(16, "the prolog fails on the first node, and Slurm requeues and holds the job"),
        cause="prolog_failure",
        action="released by `watch --act`; Slurm has drained the node",
        identical=60,
    )
