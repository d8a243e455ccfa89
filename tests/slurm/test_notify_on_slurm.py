"""Messages of real runs: each event once, whoever looks, and what the job could not send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage
from virtual_clock import ShiftedClock
from webhook_server import PATH, Webhook, sendmail_stand_in, webhook

from hpctrain.records.ledger import EventKind
from hpctrain.records.notices import read_outbox
from hpctrain.runs.state import RunState
from hpctrain.runs.watch import watch

pytestmark = pytest.mark.stand_in

SECRET = PATH.rpartition("/")[2].encode()
# Before torch is imported: the run costs hardly more than its job.
AT_ONCE = tuple(PlannedFault(epoch=0, rank=rank, do="fail", text="bad batch") for rank in (0, 1))


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


def told(hook: Webhook, place: Path, **more: object) -> dict[str, object]:
    """A section of the profile: Slack, and mail by a program that keeps what it is given."""
    place.mkdir(exist_ok=True)
    channels = [
        {"kind": "slack", "url_file": str(hook.file(place))},
        {"kind": "mail", "to": ["ada@example.org"], "sendmail": str(sendmail_stand_in(place))},
    ]
    return {"notify": json.dumps({"channels": channels, **more})}


def look(stage: Stage, rehearsal: Rehearsal) -> list[tuple[str, str | None]]:
    """A pass of `watch`: channel and problem of what it sends about this run."""
    result = watch(stage.runs, stage.slurm, act=True, grace_seconds=0.0)
    assert result.complete, result
    mine = (one for one in result.notices if one.run_id == rehearsal.run.run_id)
    return [(one.channel, one.problem) for one in mine]


def test_a_run_that_fails_for_good_is_told_once(
    stage: Stage, hook: Webhook, tmp_path: Path
) -> None:
    """Though the supervisor looks, and watch at the same time, again and again."""
    rehearsal = stage.start(
        "name=told", "supervise.failures_without_progress=2",
        planned=AT_ONCE, profile=told(hook, tmp_path / "secrets"),
    )  # fmt: skip
    rehearsal.wait(lambda: bool(look(stage, rehearsal) or hook.received), "told")
    row = rehearsal.wait_till_over()
    assert row.state is RunState.FAILED, rehearsal.logs()
    for _ in range(3):
        look(stage, rehearsal)
    (text,) = hook.texts
    assert text.startswith(f"{rehearsal.run.run_id} has FAILED")
    ended = rehearsal.events(EventKind.LAUNCH_ENDED)[-1]
    assert f"Cause: {ended.cause}: {ended.reason}" in text
    mail = (tmp_path / "secrets" / "mail.txt").read_text()
    assert mail.count("To: ada@example.org\n") == 1 and f"Cause: {ended.cause}" in mail
    # Slurm has the script and the environment of the job, too.
    script = stage.sandbox.command("scontrol", "write", "batch_script", str(rehearsal.job_id), "-")
    assert SECRET.decode() not in str(script)
    holders = [p for p in rehearsal.run.layout.directory.rglob("*")
               if p.is_file() and SECRET in p.read_bytes()]  # fmt: skip
    assert holders == []


@pytest.mark.variant("test_a_run_that_fails_for_good_is_told_once")
def test_what_a_job_could_not_send_is_sent_by_watch(
    stage: Stage, hook: Webhook, tmp_path: Path, shifted_clock: ShiftedClock
) -> None:
    """The webhook is down while the job ends, as it is for nodes without a network."""
    hook.answer = 503
    rehearsal = stage.start(
        "name=untold", "supervise.failures_without_progress=1",
        planned=AT_ONCE, profile=told(hook, tmp_path / "secrets"),
    )  # fmt: skip
    rehearsal.wait_till_over()
    assert len(hook.received) == 1, rehearsal.logs()
    tries = read_outbox(rehearsal.run.layout).of_channel("slack")
    assert [(one.state, one.problem) for one in tries] == [
        ("failed", "the server answers HTTP 503")
    ]
    assert look(stage, rehearsal) == [], "it was tried a moment ago, and the mail was sent"
    hook.answer = 200
    shifted_clock.ahead_seconds = 61.0
    assert look(stage, rehearsal) == [("slack", None)]
    assert look(stage, rehearsal) == []
    assert len(hook.received) == 2 and hook.texts[0] == hook.texts[1]
    assert (tmp_path / "secrets" / "mail.txt").read_text().count("Subject:") == 1
