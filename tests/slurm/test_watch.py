"""`hpctrain watch` on a real Slurm: it brings back what was lost, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import MADE_UP, Rehearsal, Stage, answer, held
from variants import varied

from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import submitted_ids
from hpctrain.records.ledger import EventKind
from hpctrain.runs.state import RunState
from hpctrain.runs.watch import WatchPass, watch
from hpctrain.runs.watch_rules import Symptom
from hpctrain.sandbox import faults

pytestmark = pytest.mark.stand_in


def one_pass(rehearsal: Rehearsal, stage: Stage) -> WatchPass:
    """A pass that acts, over the runs of this stage; what it says of the one rehearsed."""
    result = watch(stage.runs, stage.slurm, act=True, grace_seconds=0.0)
    assert result.complete, result
    mine = tuple(one for one in result.seen if one.run_id == rehearsal.run.run_id)
    return result.model_copy(update={"seen": mine})


def ended(rehearsal: Rehearsal) -> bool:
    record = answer(rehearsal.slurm, rehearsal.job_id)
    return record is not None and record.state.is_ended


@pytest.mark.variant("test_a_held_run_stays_held")
def test_a_job_lost_with_its_node_comes_back_where_slurm_may_not_requeue(
    stage: Stage, reference: RunFiles
) -> None:
    rehearsal = stage.start("name=lost", continuation="none", planned=held(1, 14))
    rehearsal.wait_for_checkpoint(10)
    assert one_pass(rehearsal, stage).seen == (), "it runs"
    faults.crash_node(stage.sandbox, rehearsal.nodes()[0])
    rehearsal.wait_until(lambda _: ended(rehearsal), "given up by Slurm")
    (seen,) = one_pass(rehearsal, stage).seen
    assert (seen.symptom, seen.outcome) == (Symptom.ORPHANED, "done"), seen
    assert one_pass(rehearsal, stage).seen == (), "once"
    first, rehearsal.job_id = submitted_ids(rehearsal.run.ledger.events())
    rehearsal.assert_done_exactly(reference)
    (lost,) = rehearsal.events(EventKind.ATTEMPT_LOST)
    assert (lost.job_id, lost.cause) == (first, "node_failure"), rehearsal.logs()


@pytest.mark.variant("test_a_held_run_stays_held")
def test_what_its_user_has_cancelled_is_not_resurrected(stage: Stage) -> None:
    """Both times without a word of a supervisor: only Slurm knows, and not for long."""
    stage.fill()
    waiting = stage.start("name=waiting", "resources.gpus=2", continuation="none")
    stage.sandbox.command("scancel", str(waiting.job_id))
    waiting.wait_until(lambda _: ended(waiting), "cancelled")
    (seen,) = one_pass(waiting, stage).seen
    assert (seen.symptom, seen.outcome) == (Symptom.CANCELLED, "told")
    assert waiting.status().state is RunState.CANCELLED
    assert one_pass(waiting, stage).seen == (), "the ledger remembers"
    assert submitted_ids(waiting.run.ledger.events()) == [waiting.job_id]


def test_a_held_run_stays_held(stage: Stage) -> None:
    held = stage.start("name=held", "budget.steps=4000", MADE_UP)
    held.wait_for_step(1)
    stage.sandbox.command("scontrol", "requeuehold", str(held.job_id))
    held.wait_until(lambda row: row.state is RunState.PENDING, "pending")
    assert one_pass(held, stage).seen == ()
    record = stage.slurm.show_job(held.job_id)
    assert (
        record is not None and record.state.is_pending and "held" in (record.reason or "").lower()
    )


@pytest.mark.parametrize("silence", varied(["hangs", "prints nothing", "fails"], "hangs"))
def test_a_squeue_that_does_not_answer(silence: str, stage: Stage, tmp_path: Path) -> None:
    """A shim takes the place of squeue: then nothing is known, done or confirmed."""
    stage.fill()
    rehearsal = stage.start(f"name=blind-{silence.split()[0]}", continuation="none")
    stage.sandbox.command("scancel", str(rehearsal.job_id))
    shim = tmp_path / "squeue"
    words = {"hangs": "exec sleep 60", "prints nothing": "exit 0", "fails": "exit 1"}[silence]
    shim.write_text(f"#!/bin/sh\n{words}\n")
    shim.chmod(0o755)
    heartbeat = tmp_path / "beat.json"
    before = rehearsal.run.layout.ledger.read_bytes()
    environment = {**os.environ, **stage.sandbox.environment()}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    program = Path(sys.executable).with_name("hpctrain")
    command = [str(program), "watch", "--act", "--grace", "0s"]
    command += ["--runs", str(stage.runs), "--heartbeat", str(heartbeat)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 5, done
    assert "no heartbeat was written" in done.stderr and done.stdout == ""
    assert not heartbeat.exists() and rehearsal.run.layout.ledger.read_bytes() == before
