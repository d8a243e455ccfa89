"""`hpctrain watch` as cron and monitoring see it: streams and exit codes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import hpctrain
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, fabricate

from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

RUN = "gpt-tiny-7f3a"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """One run whose job has died with its node."""
    monkeypatch.chdir(tmp_path)
    fake = FakeSlurm()
    fake.submit("#!/bin/sh\n")
    fake.records[1] = replace(fake.records[1], state=JobState.NODE_FAIL, end_time=1.0)
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    fabricate(tmp_path / "runs", RUN, (*SUBMITTED, STARTED, LAUNCHED))
    return fake


def test_it_tells_what_it_would_do_and_then_does_it(slurm: FakeSlurm) -> None:
    would = hpctrain("watch")
    reason = "the supervisor of job 1 recorded no end: one of its nodes failed"
    line = f"{RUN}  orphaned: {reason}  [would resubmit]\n"
    assert (would.stdout, would.stderr, would.exit_code) == (line, "", 0)
    done = hpctrain("watch", "--act")
    assert "[resubmit: submitted as job 2]" in done.stdout and done.exit_code == 0
    again = hpctrain("watch", "--act")
    assert (again.stdout, again.stderr, again.exit_code) == ("", "", 0), "cron mails every line"


def test_json(slurm: FakeSlurm) -> None:
    document = json.loads(hpctrain("watch", "--json").stdout)["watch"]
    (seen,) = document["seen"]
    assert (seen["symptom"], seen["outcome"]) == ("orphaned", "would")
    assert document["complete"] is True and document["open_runs"] == 1


def test_silence_and_refusals_of_slurm_end_with_5(slurm: FakeSlurm) -> None:
    slurm.away = True
    blind = hpctrain("watch", "--act")
    assert blind.exit_code == 5 and "no heartbeat was written" in blind.stderr
    slurm.away, slurm.refusal = False, "Invalid account"
    refused = hpctrain("watch", "--act")
    assert refused.exit_code == 5 and "[resubmit FAILED: Invalid account]" in refused.stdout


def test_the_heartbeat_for_monitoring(slurm: FakeSlurm) -> None:
    missing = hpctrain("watch", "--check-heartbeat", "15min")
    assert missing.exit_code == 1 and "no heartbeat in runs/.watch" in missing.stderr
    assert hpctrain("watch").exit_code == 0
    assert hpctrain("watch", "--check-heartbeat", "15min").exit_code == 0
    path = Path("runs/.watch/heartbeat.json")
    path.write_text(path.read_text().replace(str(int(time.time()))[:4], "1000", 1))
    assert hpctrain("watch", "--check-heartbeat", "15min").exit_code == 1
    assert hpctrain("watch", "--check-heartbeat", "soon").exit_code == 2
    assert hpctrain("watch", "--grace", "soon").exit_code == 2


def test_the_lines_for_cron_are_whole(slurm: FakeSlurm) -> None:
    hint = hpctrain("watch", "--install-hint").stdout
    lines = [line for line in hint.splitlines() if line and not line.startswith("#")]
    cron = [line for line in lines if line.startswith("*/")]
    runs = os.path.abspath("runs")
    assert len(cron) == 2 and all(line.endswith(f"watch --act --runs {runs}") for line in cron)
    assert all(Path(line.split()[5]).is_absolute() for line in cron)
    path = next(line for line in lines if line.startswith("PATH="))
    assert path.endswith("/usr/bin:/bin")
    assert not Path("runs/.watch").exists(), "a hint does nothing"
