"""Step ids of lost attempts are used up before a step is started that matters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
from supervise_facts import config

from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.supervise.context import AttemptContext, JobAttempt
from hpctrain.supervise.evidence import slurm_facts
from hpctrain.supervise.evidence.probe import STEP_NAME
from hpctrain.supervise.evidence.slurm_facts import use_up_step_ids
from hpctrain.supervise.srun_process import Signals

# Gives each step the next id, as Slurm does.
ACTOR = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
[ -e refuses ] && exit 1
wc -l < calls | { read number; echo $((number - 1)); }
"""


class Theatre:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = RunLayout(directory / "r1")
        self.layout.create()
        self.srun = directory / "srun"
        self.srun.write_text(ACTOR)
        self.srun.chmod(0o755)
        self.context = AttemptContext(
            run_layout=self.layout,
            config=config(),
            attempt=JobAttempt(5, 2, "n[0-1]", "n0"),
            ledger=Ledger(self.layout.ledger),
            slurm=cast(SlurmClient, FakeSlurm()),
            signals=Signals(),
        )

    def lost(self, restart_count: int, newest_step: int, job_id: int = 5) -> None:
        """An attempt that left no word, and logs of its ranks up to this step."""
        logs = self.layout.attempt_logs(job_id, restart_count)
        logs.mkdir(parents=True)
        for step in range(newest_step + 1):
            (logs / f"step{step}-rank0000.log").touch()
        self.context.ledger.append(
            EventKind.ATTEMPT_LOST, job_id=job_id, restart_count=restart_count
        )

    def use_up(self) -> list[str]:
        environment = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "64"}
        use_up_step_ids(self.context, environment, [str(self.srun)])
        calls = self.directory / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def theatre(tmp_path: Path) -> Theatre:
    return Theatre(tmp_path)


def test_without_lost_attempts_nothing_is_run(theatre: Theatre) -> None:
    assert theatre.use_up() == []
    theatre.lost(0, newest_step=3, job_id=4)  # steps of another job have ids of their own
    theatre.lost(1, newest_step=-1)  # it never started a rank
    assert theatre.use_up() == []


def test_the_ids_of_all_lost_attempts_and_of_a_probe_behind_them(theatre: Theatre) -> None:
    theatre.lost(0, newest_step=2)
    theatre.lost(1, newest_step=0)
    calls = theatre.use_up()
    assert len(calls) == 4, "0, 1, 2, and 3 for a probe"
    for word in ("--jobid=5", f"--job-name={STEP_NAME}", "--overlap", "--nodelist=n0"):
        assert word in calls[0].split()


def test_a_slurm_that_starts_no_step_does_not_hold_up_the_run(
    theatre: Theatre, capsys: pytest.CaptureFixture[str]
) -> None:
    theatre.lost(0, newest_step=0)
    (theatre.directory / "refuses").touch()
    assert len(theatre.use_up()) == 1
    assert "could not be used up" in capsys.readouterr().err


def test_it_takes_a_minute_at_most(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_facts, "_SECONDS", 0.0)
    theatre.lost(0, newest_step=9)
    assert theatre.use_up() == []
