"""`stop`, `save`, `hold`, `resume`, `why`, `checkpoints`: streams, exit codes, 80 columns."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
from command_line import hpctrain
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, ended, fabricate, published, said

from hpctrain.checkpoints.discover import Verified
from hpctrain.checkpoints.publish import quarantine
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import SaveRecord, append_save
from hpctrain.runs.files_command import progress_line
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

RUN = "gpt-tiny-7f3a"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    fake.submit("#!/bin/sh\n")
    fake.records[1] = replace(fake.records[1], state=JobState.RUNNING)
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    return fake


@pytest.fixture
def running(here: Path, slurm: FakeSlurm) -> RunFiles:
    acted = ended("crash", "rank 1 on n1 failed: boom", "relaunch")
    observed = said(EventKind.OBSERVED, reason="would avoid n1 (score 130)")
    return fabricate(here / "runs", RUN, [*SUBMITTED, STARTED, LAUNCHED, *acted, observed], steps=9)


# -- verbs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["stop", RUN], "stop"),
        (["stop", RUN, "--graceful"], "stop"),
        (["stop", RUN, "--now", "-y"], "stop-now"),
        (["save", RUN], "save"),
        (["hold", RUN], "hold"),
    ],
)
def test_a_verb_speaks_to_people_and_leaves_its_file(
    running: RunFiles, arguments: list[str], file: str
) -> None:
    outcome = hpctrain(*arguments, "--reason", "lunch")
    assert outcome.exit_code == 0 and outcome.stdout == "", outcome.transcript()
    assert outcome.stderr.startswith("Asked run") and len(outcome.stderr.splitlines()) == 1
    assert [path.name for path in running.layout.control.iterdir()] == [file]


def test_losing_steps_is_asked_about_first(running: RunFiles) -> None:
    outcome = hpctrain("stop", RUN, "--now")
    assert outcome.exit_code == 2 and "-y" in outcome.stderr
    assert list(running.layout.control.iterdir()) == []


def test_wrong_state_and_wrong_use(running: RunFiles, slurm: FakeSlurm) -> None:
    assert hpctrain("save", RUN, "--timeout", "3").exit_code == 2
    assert hpctrain("stop", "nobody").exit_code == 6
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)
    for verb in ("stop", "hold", "save"):
        outcome = hpctrain(verb, RUN)
        assert outcome.exit_code == 2 and "hint: " in outcome.stderr, outcome.transcript()
        assert "Traceback" not in outcome.stderr
    slurm.away = True
    assert hpctrain("resume", RUN).exit_code == 5


def test_a_second_stop_is_no_error(running: RunFiles) -> None:
    hpctrain("stop", RUN, "--reason", "lunch")
    outcome = hpctrain("stop", RUN)
    assert outcome.exit_code == 0 and "already by" in outcome.stderr and "lunch" in outcome.stderr


def test_waiting_for_a_save_prints_the_step(running: RunFiles) -> None:
    def save() -> None:
        while not running.layout.save_request.exists():
            sleep(0.01)
        running.layout.save_request.unlink()
        published(running, 10)

    trainer = threading.Thread(target=save, daemon=True)
    trainer.start()
    outcome = hpctrain("save", RUN, "--wait", "--timeout", "300")
    trainer.join(60)
    assert outcome.exit_code == 0 and outcome.stdout == "10\n", outcome.transcript()


def test_a_save_that_takes_too_long_is_an_error(running: RunFiles) -> None:
    outcome = hpctrain("save", RUN, "--wait", "--timeout", "0")
    assert outcome.exit_code == 7 and "has not saved" in outcome.stderr
    assert running.layout.save_request.exists()


def test_resume_says_what_it_did(running: RunFiles, slurm: FakeSlurm) -> None:
    assert "is running already" in hpctrain("resume", RUN).stderr
    slurm.records[1] = replace(slurm.records[1], state=JobState.PENDING, reason="JobHeldUser")
    assert "Released" in hpctrain("resume", RUN).stderr
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)
    assert "as job 2" in hpctrain("resume", RUN).stderr


def test_the_story_tells_who_asked_and_what_came_of_it(running: RunFiles) -> None:
    hpctrain("save", RUN, "--reason", "before the demo")
    story = hpctrain("describe", RUN).stdout
    assert ": before the demo\n    not followed yet\n" in story
    asked_at = running.ledger.events()[-1].time
    for time in (asked_at - 5, asked_at + 3):
        append_save(
            running.layout,
            SaveRecord(
                step=int(time - asked_at) + 10,
                epoch=1,
                time=time,
                stall_seconds=0.1,
                publish_seconds=1.0,
                size_bytes=1,
            ),
        )
    assert "    3 s later  step 13 is saved\n" in hpctrain("describe", RUN).stdout
    hpctrain("stop", RUN)
    running.ledger.append(EventKind.ACTION, action="relaunch", reason="no answer to a stop")
    running.ledger.append(EventKind.ACTION, action="stop", reason="asked to stop")
    (asked,) = json.loads(hpctrain("describe", RUN, "--json").stdout)["run"]["asked"][1:]
    assert (asked["action"], asked["answer"]) == ("stop", "stop: asked to stop")


def test_a_run_that_nobody_asked_has_no_such_section(running: RunFiles) -> None:
    assert "Requests" not in hpctrain("describe", RUN).stdout


# -- why ---------------------------------------------------------------------------------------


def test_why_in_words(running: RunFiles) -> None:
    published(running, 5)
    outcome = hpctrain("why", RUN)
    assert outcome.exit_code == 0 and outcome.stderr == "", outcome.transcript()
    for words in (
        "  cause   crash: rank 1 on n1 failed: boom",
        "Done      relaunch: because it was crash",
        "Observed  would avoid n1 (score 130); set `supervise.exclude_nodes: act` to",
        "Goes on   requeue: Slurm puts the same job back",
        "the job is preempted, the time limit comes",
        "    -> requeue: the next attempt resumes",
        "set\n       `supervise.rollback.mode: act`",
    ):
        assert words in outcome.stdout, outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    assert outcome.stdout == outcome.stdout.encode("ascii", "replace").decode(), "grep-able"


def test_evidence_is_never_cut(running: RunFiles) -> None:
    line = "rank 3 on n1: " + "x" * 200
    running.ledger.append(EventKind.LAUNCH_ENDED, cause="crash", reason="boom", evidence=(line,))
    assert f"| {line}\n" in hpctrain("why", RUN).stdout


def test_budgets_in_words(running: RunFiles) -> None:
    for _ in range(2):
        running.ledger.append(EventKind.LAUNCH_ENDED, cause="host_oom", reason="x", resume_step=30)
    told = hpctrain("why", RUN).stdout
    assert "  host oom          used up (1)\n" in told
    assert "  all together      2 of 11 used\n" in told
    assert "  1 free            gpu oom, data loader, diverged, suspect numerics\n" in told
    running.ledger.append(EventKind.LAUNCH_ENDED, cause="gpu_oom", reason="x", resume_step=30)
    told = hpctrain("why", RUN).stdout
    assert "  gpu oom           1 of 1 used; the next one stops the run\n" in told


def test_why_as_json(running: RunFiles) -> None:
    document = json.loads(hpctrain("why", RUN, "--json").stdout)
    assert document["schema_version"] == 1
    told = document["why"]
    assert told["ended"]["cause"] == "crash" and told["action"]["action"] == "relaunch"
    assert {budget["cause"] for budget in told["budgets"]} >= {"crash", "time_limit"}
    assert {one["action"] for one in told["foresight"]} >= {"requeue", "relaunch", "stop"}


def test_what_comes_after_a_stop_depends_on_a_person(here: Path, slurm: FakeSlurm) -> None:
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)
    fabricate(here / "runs", RUN, [*SUBMITTED, STARTED, LAUNCHED, *ended("crash", "boom", "stop")])
    assert "Next, after `hpctrain resume`, when\n" in hpctrain("why", RUN).stdout


# -- checkpoints -------------------------------------------------------------------------------


def test_checkpoints_in_a_pipe(running: RunFiles) -> None:
    for step in (10, 20, 30):
        published(running, step, time=NOW)
    quarantine(
        running.layout.checkpoints,
        running.layout.checkpoints / "iter_0000030",
        "rolled back to step 20",
    )
    outcome = hpctrain("checkpoints", RUN)
    assert outcome.exit_code == 0 and outcome.stderr == "", outcome.transcript()
    header, first, second, *_ = outcome.stdout.splitlines()
    assert header.split()[:4] == ["STEP", "EPOCH", "AGE", "SIZE"]
    assert first.split()[0] == "20" and "newest" in first and second.split()[0] == "10"
    assert "Quarantine  iter_0000030 (" in outcome.stdout
    assert "rolled back to step 20\n" in outcome.stdout and "Disk " in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 80


def test_verify_fails_on_a_flipped_byte_that_a_listing_does_not_see(running: RunFiles) -> None:
    for step in (10, 20):
        shard = published(running, step) / "shard.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert hpctrain("checkpoints", RUN).exit_code == 0
    outcome = hpctrain("checkpoints", RUN, "--verify")
    assert outcome.exit_code == 7
    assert "error: step 20: shard.distcp" in outcome.stderr
    assert "hint: the newest good one is step 10" in outcome.stderr
    assert "BAD" in outcome.stdout and "verifying" not in outcome.stderr, "no terminal, no line"
    document = json.loads(hpctrain("checkpoints", RUN, "--verify", "--json").stdout)
    assert [row["problem"] is None for row in document["checkpoints"]["rows"]] == [False, True]


def test_a_listing_shows_what_is_bad_and_is_no_error(running: RunFiles) -> None:
    (published(running, 10) / "shard.distcp").write_bytes(b"?")
    outcome = hpctrain("checkpoints", RUN)
    assert outcome.exit_code == 0 and outcome.stderr == "", outcome.transcript()
    assert "Bad         step 10: shard.distcp has 1 bytes instead of 1024\n" in outcome.stdout


def test_verify_of_good_ones_and_of_none(running: RunFiles) -> None:
    empty = hpctrain("checkpoints", RUN, "--verify")
    assert empty.exit_code == 0 and "no checkpoint has been published yet" in empty.stdout
    published(running, 10)
    outcome = hpctrain("checkpoints", RUN, "--verify", "--threads", "2")
    assert outcome.exit_code == 0 and "sha256" in outcome.stdout


def test_the_progress_line_ends_clean(capsys: pytest.CaptureFixture[str]) -> None:
    show = progress_line()
    for files in range(1, 101):
        show(Verified(10, files, 100, files * 2**20, 100 * 2**20))
    written = capsys.readouterr().err
    assert "100.0 MiB of 100.0 MiB" in written and written.endswith(" \r")
    assert written.count("verifying") <= 3, "not one line for each of a million files"


# -- weight ------------------------------------------------------------------------------------


def test_these_commands_import_nothing_heavy() -> None:
    code = (
        "import sys; import hpctrain.runs.control_command, hpctrain.runs.why;"
        "import hpctrain.runs.command;"
        "import hpctrain.runs.files_command, hpctrain.runs.control, hpctrain.runs.why;"
        "import hpctrain.runs.checkpoint_list;"
        "print([m for m in ('torch', 'numpy', 'pandas', 'ruamel', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n", done.stdout


# -- commands to type next ---------------------------------------------------------------------


def test_printed_commands_have_the_directory_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only then: hpctrain finds runs by $HPCTRAIN_RUNS without being told."""
    other = tmp_path / "other runs"
    command = fabricate(other).command("resume")
    assert command == f"hpctrain resume gpt-tiny-7f3a --runs '{other}'"
    told = hpctrain("status", "gpt-tiny-7f3a", "--runs", str(other)).stdout
    assert f"hpctrain why gpt-tiny-7f3a --runs '{other}'" in told
    monkeypatch.setenv("HPCTRAIN_RUNS", str(other))
    assert "--runs" not in hpctrain("status", "gpt-tiny-7f3a").stdout
