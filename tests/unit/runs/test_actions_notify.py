"""Telling from the login node: passes of `watch`, checks before `submit`, commands for people."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from command_line import hpctrain
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, published, said
from webhook_server import PATH, Webhook, sendmail_stand_in, webhook

from hpctrain.job.supervisor_settings import notify_settings
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.runs.notify import send_notices
from hpctrain.runs.watch import watch
from hpctrain.runs.watch_rules import DiskSpace, Symptom
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.spec.notify import NotifySpec, joined_notify

SECRET = PATH.rpartition("/")[2]
BEGUN = (*SUBMITTED, STARTED, LAUNCHED)
SPEC = """\
name: small
model: {layers: 4, hidden: 128, heads: 4, vocab: 512, seq: 128}
batch: {global: 8, micro: 2}
budget: {steps: 60}
parallel: {tp: 2, pp: 2}
precision: fp32
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 20}
resources: {gpus: 4}
"""


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "small.yaml"


def at_present(run: RunFiles) -> RunFiles:
    """The fabricated events are of now."""
    lines = [json.loads(line) for line in run.layout.ledger.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["time"] = time.time() - 60 + number
    run.layout.ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def telling(run: RunFiles, **notify: object) -> RunFiles:
    path = run.layout.supervise_config
    config = SuperviseConfig.model_validate_json(path.read_bytes())
    settings = notify_settings(NotifySpec.model_validate(notify))
    path.write_text(config.model_copy(update={"notify": settings}).model_dump_json())
    return at_present(run)


def slack(hook: Webhook, directory: Path) -> list[dict[str, object]]:
    return [{"kind": "slack", "url_file": str(hook.file(directory))}]


def client(*jobs: JobRecord) -> SlurmClient:
    fake = FakeSlurm()
    fake.records = {job.job_id: job for job in jobs}
    return cast(SlurmClient, fake)


# -- a pass ----------------------------------------------------------------------------------------


def test_a_pass_tells_what_nobody_has_told(hook: Webhook, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = (*BEGUN, *ended("done", "", "finish"))[:-1]
    finish = said(EventKind.ACTION, action="finish", cause="done", reason="the run is done")
    run = fabricate(runs, entries=(*done, finish), done=True)
    telling(run, channels=slack(hook, tmp_path))
    assert watch(runs, client()).notices == (), "without --act nothing is sent"
    assert watch(runs, client(), act=True).notices == (), "left to the job for the grace"
    result = watch(runs, client(), act=True, grace_seconds=0.0)
    assert [(one.run_id, one.kinds, one.problem) for one in result.notices] == [
        (run.run_id, ("done",), None)
    ]
    assert watch(runs, client(), act=True, grace_seconds=0.0).notices == ()
    (text,) = hook.texts
    assert text.startswith(f"{run.run_id} is DONE")


def test_what_watch_finds_itself_is_told_in_the_same_pass(hook: Webhook, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = fabricate(runs, entries=BEGUN)
    telling(run, channels=slack(hook, tmp_path), on=["requeued"])
    dead = JobRecord(1, state=JobState.NODE_FAIL, restart_count=0, node_list="n0", end_time=1.0)
    (notice,) = watch(runs, client(dead), act=True).notices
    assert notice.kinds == ("requeued",)
    assert "`hpctrain watch` submits it again" in hook.texts[0]


@pytest.mark.parametrize(("hours", "told"), [(25, True), (23, False)])
def test_a_job_that_waits_for_too_long_is_told(
    hook: Webhook, tmp_path: Path, hours: int, told: bool
) -> None:
    runs = tmp_path / "runs"
    run = fabricate(runs, entries=SUBMITTED)
    telling(run, channels=slack(hook, tmp_path), queue_limit="1d")
    since = time.time() - 3600 * hours
    waiting = JobRecord(1, state=JobState.PENDING, reason="Priority", submit_time=since)
    for _ in range(3):
        watch(runs, client(waiting), act=True)
    assert len(hook.received) == int(told), "once"
    if told:
        assert "it has waited 25 h, more than 24 h (Priority)" in hook.texts[0]


def test_a_disk_that_fills_up_is_told(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    run = fabricate(runs, entries=BEGUN, steps=30)
    published(run, 30)
    telling(run, channels=slack(hook, tmp_path))
    running = JobRecord(1, state=JobState.RUNNING, start_time=time.time())
    assert watch(runs, client(running), act=True).seen == (), "there is room"
    low = DiskSpace(free_bytes=3 << 40, checkpoint_bytes=2 << 40)
    monkeypatch.setattr("hpctrain.runs.watch.disk_space", lambda *words: low)
    (seen,) = watch(runs, client(running), act=True).seen
    assert seen.symptom is Symptom.DISK_LOW
    assert "3.0 TiB are left" in hook.texts[0] and "hpctrain clean" in hook.texts[0]


def test_a_disk_that_stays_full_is_told_once_whatever_happens(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its report is further back than the end of the ledger that is read first."""
    runs = tmp_path / "runs"
    run = fabricate(runs, entries=BEGUN, steps=30)
    published(run, 30)
    telling(run, channels=slack(hook, tmp_path))
    low = DiskSpace(free_bytes=3 << 40, checkpoint_bytes=2 << 40)
    monkeypatch.setattr("hpctrain.runs.watch.disk_space", lambda *words: low)
    running = JobRecord(1, state=JobState.RUNNING, start_time=time.time())
    for number in range(5):
        watch(runs, client(running), act=True)
        run.ledger.append(EventKind.LAUNCH_STARTED, job_id=1, epoch=number + 2, resume_step=30)
    for _ in range(100):
        run.ledger.append(EventKind.OBSERVED, job_id=1, reason="x" * 200)
    run.ledger.append(EventKind.SUBMITTED, job_id=1)
    watch(runs, client(running), act=True)
    assert len(hook.received) == 1


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS])
def test_a_pass_says_what_it_cannot_write(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    runs = tmp_path / "runs"
    for name in ("r1", "r2"):
        stopped = (*BEGUN, *ended("crash", "boom", "stop"))
        telling(fabricate(runs, name, stopped), channels=slack(hook, tmp_path), on=["failed"])
    fabricate(runs, "r3", BEGUN)

    def full(*words: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        for name in ("records.notices.create_exclusive", "runs.watch.replace_text"):
            patch.setattr(f"hpctrain.{name}", full)
        patch.setattr("hpctrain.records.ledger.append_line", full)
        dead = JobRecord(1, state=JobState.NODE_FAIL, restart_count=0, end_time=1.0)
        patch.setattr("hpctrain.slurm.client.SlurmClient", lambda *words: client(dead))
        done = hpctrain("watch", "--act", "--grace", "0s", "--runs", str(runs))
    words = os.strerror(number)
    assert done.exit_code == 1 and hook.received == []
    for name in ("r1", "r2"):
        line = f"{name}  not told: failed  [slack FAILED: this cannot be recorded in its directory"
        assert f"{line}: {words}]" in done.stdout
    assert f"resubmit FAILED: {runs}/r3/ledger.jsonl cannot be written: {words}" in done.stdout
    assert f"heartbeat.json cannot be written: {words}" in done.stderr.replace("\n", " ")
    assert len(watch(runs, client(), act=True, grace_seconds=0.0).notices) == 2


def test_a_broken_channel_holds_up_a_pass_once(hook: Webhook, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    hook.answer = 500
    for number in range(5):
        stopped = (*BEGUN, *ended("crash", "boom", "stop"))
        run = fabricate(runs, f"r{number}", stopped)
        telling(run, channels=slack(hook, tmp_path), on=["failed"])
    result = watch(runs, client(), act=True, grace_seconds=0.0)
    assert len(result.notices) == len(hook.received) == 1
    assert "HTTP 500" in (result.notices[0].problem or "")


def test_old_news_is_not_sent(hook: Webhook, tmp_path: Path) -> None:
    run = telling(
        fabricate(tmp_path / "runs", entries=BEGUN), channels=slack(hook, tmp_path), on=["started"]
    )
    events = run.layout.ledger.read_text()
    run.layout.ledger.write_text(events.replace('"time": ', '"time": 1.0, "was": '))
    assert send_notices([run]) == () and not hook.received
    at_present(run)
    assert len(send_notices([run])) == 1


# -- spec and site -----------------------------------------------------------------------------


def test_a_spec_replaces_single_fields_of_its_site() -> None:
    site = NotifySpec.model_validate(
        {
            "channels": [{"kind": "mail", "to": ["admins"]}],
            "quiet_hours": "22:00-07:00",
            "time_zone": "UTC",
            "even_at_night": ["failed"],
            "at_most": "1/min",
        }
    )
    own = NotifySpec.model_validate({"on": ["done"]})
    joined = joined_notify(own, site)
    assert joined is not None
    assert (joined.channels, joined.on, joined.at_most) == (site.channels, ("done",), "1/min")
    assert (joined.quiet_hours, joined.even_at_night) == ("22:00-07:00", ())
    assert joined_notify(NotifySpec(channels=()), site) is None or not own.channels
    assert joined_notify(NotifySpec.model_validate({"channels": []}), site) is None
    assert joined_notify(None, site) == site and joined_notify(None, None) is None


def test_channels_have_names_and_absolute_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/ada")
    settings = notify_settings(
        NotifySpec.model_validate(
            {
                "channels": [
                    {"kind": "slack", "url_file": "~/a"},
                    {"kind": "slurm"},
                    {"kind": "slack", "url_file": "b"},
                ]
            }
        )
    )
    assert settings is not None
    assert [(one.name, one.url_file) for one in settings.channels] == [
        ("slack", "/data/ada/a"),
        ("slack-2", os.path.abspath("b")),
    ]


def test_slurms_own_mail_is_a_line_of_the_script(spec: Path) -> None:
    spec.write_text(
        SPEC + "notify: {channels: [{kind: slurm, to: [ada@example.org]}], on: [failed, started]}\n"
    )
    done = hpctrain("submit", "-p", "sandbox", spec.name, "--dry-run")
    assert "#SBATCH --mail-type=BEGIN,FAIL\n#SBATCH --mail-user=ada@example.org\n" in done.stdout


# -- checks and commands -----------------------------------------------------------------------


def test_a_file_that_others_can_read_is_refused_at_its_line(
    hook: Webhook, spec: Path, tmp_path: Path
) -> None:
    file = hook.file(tmp_path)
    file.chmod(0o644)
    spec.write_text(SPEC + f"notify:\n  channels:\n    - {{kind: slack, url_file: {file.name}}}\n")
    for command in ("validate", "submit"):
        done = hpctrain(command, "-p", "sandbox", spec.name, *(["-y"] * (command == "submit")))
        assert done.exit_code == 3
        assert f"{spec.name}:12:31: `notify.channels[0].url_file`: {file} has mode 0644" in (
            done.stderr
        )
        assert f"chmod 600 {file}" in done.stderr and SECRET not in done.transcript()
    assert not Path("runs").exists()
    file.chmod(0o600)
    done = hpctrain("validate", "-p", "sandbox", spec.name)
    assert done.exit_code == 0
    assert "ok    notify: slack" in done.stdout
    assert "no pass of `hpctrain watch --act` in the last hour" in done.stdout.replace(
        "\n      ", " "
    )


def test_what_is_wrong_with_a_channel_of_the_site_is_said_of_its_profile(
    spec: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "site.yaml"
    channel = "{kind: mail, to: [ada], sendmail: /nowhere/sendmail}"
    profile.write_text(f"extends: sandbox\nname: site\nnotify:\n  channels: [{channel}]\n")
    spec.write_text(SPEC)
    done = hpctrain("validate", "-p", str(profile), spec.name)
    assert done.exit_code == 3
    assert (
        "site.yaml:4:" in done.stderr and "/nowhere/sendmail is not on this machine" in done.stderr
    )
    spec.write_text(SPEC + "notify: {channels: []}\n")
    assert hpctrain("validate", "-p", str(profile), spec.name).exit_code == 0


def test_a_secret_in_a_spec_is_refused_and_not_repeated(spec: Path) -> None:
    for channel in (
        f"{{kind: slack, url: https://hooks.slack.com{PATH}}}",
        f"{{kind: slack, url_file: 'https://hooks.slack.com{PATH}'}}",
        f"{{kind: webhook, url_file: x, token: {SECRET}}}",
    ):
        spec.write_text(SPEC + f"notify: {{channels: [{channel}]}}\n")
        done = hpctrain("validate", spec.name)
        assert done.exit_code == 3 and SECRET not in done.transcript(), done.transcript()
        assert "secret" in done.stderr or "chmod 600" in done.stderr


def test_the_test_message(hook: Webhook, spec: Path, tmp_path: Path) -> None:
    program = sendmail_stand_in(tmp_path)
    spec.write_text(
        SPEC + "notify:\n  channels:\n"
        f"    - {{kind: slack, url_file: {hook.file(tmp_path)}}}\n"
        f"    - {{kind: mail, to: [ada], sendmail: {program}}}\n"
    )
    done = hpctrain("notify", spec.name, "-p", "sandbox", "--test")
    assert done.exit_code == 0, done.transcript()
    # the lines are as wide as the terminal, and the path of the program may be longer
    assert done.stdout.split() == f"ok slack: accepted ok mail: handed to {program}".split()
    assert "This is a test of small on sandbox" in hook.texts[0]
    assert "This is a test" in (tmp_path / "mail.txt").read_text()
    hook.answer = 404
    failed = hpctrain("notify", spec.name, "-p", "sandbox", "--test")
    assert failed.exit_code == 1 and "HTTP 404" in failed.stdout
    assert "not sent: slack" in failed.stderr and SECRET not in failed.transcript()


def test_a_run_shows_what_it_has_told(hook: Webhook, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = fabricate(runs, "small-0001", (*BEGUN, *ended("crash", "boom", "stop")))
    telling(run, channels=slack(hook, tmp_path), on=["started", "failed"])
    words = ("small-0001", "--runs", str(runs))
    assert "slack  started waits" in hpctrain("notify", *words).stdout
    assert "Notices    0 sent" in hpctrain("describe", *words).stdout
    send_notices([run])
    shown = hpctrain("notify", *words).stdout
    assert "slack  started sent, 1 try" in shown and "slack  failed sent, 1 try" in shown
    assert "Notices    2 sent, the last: failed" in hpctrain("describe", *words).stdout
    rows = json.loads(hpctrain("notify", *words, "--json").stdout)["notices"]
    assert [row["state"] for row in rows] == ["sent", "sent"]
    assert hpctrain("notify", *words, "--test").exit_code == 0


def test_the_page_of_a_run_shows_what_has_not_arrived(hook: Webhook, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = fabricate(runs, "small-0001", (*BEGUN, *ended("crash", "boom", "stop")))
    telling(run, channels=slack(hook, tmp_path), on=["started", "failed"])
    hook.answer = 404
    send_notices([run])
    page = hpctrain("status", "small-0001", "--runs", str(runs)).stdout
    assert "Not told" in page and "slack  failed" in page and "HTTP 404" in page


def test_a_message_without_an_answer_is_shown_as_unknown(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    run = fabricate(runs, "small-0001", BEGUN)
    telling(run, channels=slack(hook, tmp_path), on=["started"])
    hook.hold = threading.Event()
    monkeypatch.setattr("hpctrain.notify.channels.SEND_SECONDS", 2.0)
    send_notices([run])
    shown = hpctrain("notify", "small-0001", "--runs", str(runs)).stdout
    assert "slack  started unknown, 1 try: no answer" in shown and "may have arrived" in shown


def test_a_run_that_tells_nobody(tmp_path: Path) -> None:
    fabricate(tmp_path / "runs", "small-0001")
    done = hpctrain("notify", "small-0001", "--runs", str(tmp_path / "runs"), "--test")
    assert done.exit_code == 2 and "nobody is told" in done.stderr
    assert (
        "Notices" not in hpctrain("describe", "small-0001", "--runs", str(tmp_path / "runs")).stdout
    )
