"""Slurm itself is away, answers nothing, or is asked for the same run twice."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from rehearsal import Rehearsal, Stage, held, wait_till_remembered
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.sandbox import faults
from hpctrain.slurm.client import SlurmClient

pytestmark = pytest.mark.stand_in

_AWAY_SECONDS = 15.0


def test_a_controller_that_is_away_disturbs_nothing(
    stage: Stage, reference: RunFiles, survival: Survival, tmp_path: Path
) -> None:
    """A rank dies meanwhile: whether that was a crash is known when Slurm answers again."""
    rehearsal = stage.start("name=controller", planned=held(1, 14, rank=0))
    epoch = rehearsal.wait_for_progress()
    wait_till_remembered(stage.sandbox)
    faults.kill_controller(stage.sandbox)
    rehearsal.kill_rank(0)
    nobody_concludes_anything(rehearsal, tmp_path)
    time.sleep(_AWAY_SECONDS)
    faults.restart_controller(stage.sandbox)
    fault = Fault(18, "slurmctld is killed, then a rank; slurmctld comes back 15 s later")
    survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=epoch)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 1, rehearsal.logs()
    survival.shown(
        Fault(19, "squeue and scontrol fail, then hang, in the middle of it"),
        action="`hpctrain status` says UNKNOWN",
    )


def nobody_concludes_anything(rehearsal: Rehearsal, directory: Path) -> None:
    """First no controller answers, then the commands themselves hang."""
    assert rehearsal.status().state is RunState.UNKNOWN
    for name in ("squeue", "scontrol", "sacct"):
        command = directory / name
        command.write_text("#!/bin/sh\nexec sleep 600\n")
        command.chmod(0o755)
    environment = {**os.environ, **rehearsal.sandbox.environment()}
    environment["PATH"] = f"{directory}:{environment['PATH']}"
    hanging = SlurmClient(environment, timeout_seconds=1.0)
    asked_at = time.monotonic()
    assert statuses([rehearsal.run], hanging)[0].state is RunState.UNKNOWN
    assert time.monotonic() - asked_at < 300, "a command that hangs must not be waited for"
