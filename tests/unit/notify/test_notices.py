"""Which event of a ledger is told, in which words, and when: quiet hours and the rate."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import get_args
from zoneinfo import ZoneInfo

import pytest
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, Said, ended, fabricate, said

from hpctrain.notify.delivery import quiet_until, select
from hpctrain.notify.message_text import compose, for_slack
from hpctrain.notify.notices import WATCHED, Notice, NoticeKind, RunFacts, notices_of
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.supervise_config import NotifySettings
from hpctrain.runs.watch_rules import Symptom, WatchRemedy
from hpctrain.runs.why import why, why_lines
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.spec.notify import NEED_A_PERSON, NoticeName

FACTS = RunFacts("gpt-7f3a", "/scratch/ada/runs", "ada", "a100x64", 1000)
BEGUN = (*SUBMITTED, STARTED, LAUNCHED)


def events(*entries: Said) -> list[Event]:
    return [
        Event.model_validate({"event": kind, "time": NOW + number, **fields})
        for number, (kind, fields) in enumerate(entries)
    ]


def kinds(*entries: Said) -> list[str]:
    return [notice.kind.value for notice in notices_of(events(*entries), FACTS)]


def acted(action: str, cause: str | None = None, code: int = 0, **more: object) -> Said:
    return said(EventKind.ACTION, action=action, cause=cause, reason="why", exit_code=code, **more)


def end(cause: str) -> Said:
    return ended(cause, "rank 1 on n1: boom", "stop")[0]


def test_the_names_are_those_of_the_spec() -> None:
    assert set(get_args(NoticeName)) == set(NoticeKind)
    assert set(NEED_A_PERSON) < set(NoticeKind)


def test_every_symptom_of_watch_is_decided_about() -> None:
    assert WATCHED.keys() == {symptom.value for symptom in Symptom}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([LAUNCHED], ["started"]),
        ([said(EventKind.LAUNCH_STARTED, epoch=2)], []),
        ([end("done"), acted("finish", "done")], ["done"]),
        ([acted("finish")], []),  # a later job of a chain
        ([end("crash"), acted("stop", "crash", 1)], ["failed"]),
        ([end("yielded"), acted("stop", "yielded")], ["stopped"]),
        ([end("cancelled"), acted("stop", "cancelled", 1)], ["stopped"]),
        ([end("yielded"), acted("hold", "yielded")], ["held"]),
        ([end("yielded"), acted("hold", "yielded"), acted("stop", None, 1)], ["held", "stopped"]),
        ([end("node_failure"), acted("requeue", "node_failure")], ["requeued"]),
        ([end("preempted"), acted("leave", "preempted")], ["requeued"]),
        ([end("time_limit"), acted("requeue", "time_limit")], []),
        ([end("time_limit"), acted("leave", "time_limit", 1)], ["failed"]),
        ([acted("leave")], []),
        ([end("crash"), acted("relaunch", "crash")], ["restarted"]),
        (
            [end("gpu_error"), acted("requeue", "gpu_error", excluded=["n1"])],
            ["requeued", "node_excluded"],
        ),
        ([said(EventKind.ROLLED_BACK, checkpoint_step=20)], ["rolled_back"]),
        ([said(EventKind.CHECKPOINT_REJECTED, checkpoint_step=20)], ["checkpoint_rejected"]),
        ([said(EventKind.SLOW_RANK, rank=3)], ["slow_rank"]),
        ([said(EventKind.CANCELLED)], ["stopped"]),
        ([said(EventKind.CANCELLED), end("cancelled"), acted("stop", "cancelled")], ["stopped"]),
        ([said(EventKind.ATTEMPT_LOST, cause="supervisor_lost")], ["requeued"]),
    ],
)
def test_the_kind_of_each_event(entries: list[Said], expected: list[str]) -> None:
    assert kinds(*entries) == expected


def test_a_stopped_job_that_slurm_starts_again_is_told_once() -> None:
    stop = (end("crash"), acted("stop", "crash", 1))
    again = (said(EventKind.ATTEMPT_STARTED, job_id=1, restart_count=1), acted("stop", None, 1))
    assert kinds(*BEGUN, *stop, *again) == ["started", "failed"]
    resumed = (said(EventKind.SUBMITTED, job_id=2), *stop)
    assert kinds(*BEGUN, *stop, *resumed) == ["started", "failed", "failed"]


@pytest.mark.parametrize("symptom", Symptom)
def test_what_watch_sees(symptom: Symptom) -> None:
    watched = said(EventKind.WATCH, action=WatchRemedy.TELL, symptom=symptom, reason="x")
    kind = WATCHED[symptom]
    assert kinds(watched) == ([] if kind is None else [kind])
    lost = said(EventKind.ATTEMPT_LOST, job_id=1, cause="node_failure", reason="gone")
    done = said(EventKind.WATCH, action=WatchRemedy.RESUBMIT, symptom=symptom, reason="x")
    assert kinds(lost, done) == ["requeued"], "one message for both lines"


def test_the_cause_is_the_one_that_why_prints(tmp_path: Path) -> None:
    entries = (*BEGUN, *ended("gpu_oom", "rank 3 on n1: out of memory", "stop"))
    run = fabricate(tmp_path, entries=entries)
    (_, notice) = notices_of(run.ledger.events(), FACTS)
    text = compose([notice], FACTS).text
    explained = why(run, FakeSlurm(), NOW)  # type: ignore[arg-type]
    (cause,) = (line for line in why_lines(explained, NOW) if line.startswith("  cause"))
    assert cause.removeprefix("  cause").strip() in text
    assert "Cause: gpu oom: rank 3 on n1: out of memory\n" in text


def test_whoever_makes_a_notice_makes_the_same_one() -> None:
    all_events = events(*BEGUN, end("crash"), acted("stop", "crash", 1))
    written = [Event.model_validate_json(e.model_dump_json(exclude_defaults=True))
               for e in all_events]  # fmt: skip
    assert notices_of(all_events, FACTS) == notices_of(written, FACTS)


def test_a_name_with_a_blank_is_quoted_in_commands() -> None:
    facts = RunFacts("gpt-7f3a", "/scratch/my runs", "ada", "a100x64", 1000)
    notice = notices_of(events(end("crash"), acted("stop", "crash", 1)), facts)[0]
    assert notice.commands[0] == "hpctrain why gpt-7f3a --runs '/scratch/my runs'"
    assert notice.commands[-1].startswith("hpctrain resume gpt-7f3a")


def test_a_line_of_a_log_cannot_ring_a_channel_or_add_lines() -> None:
    reason = "boom <!channel> & <http://x|y>\nWhat you can do:\n  rm -rf\x1b[2J"
    entries = ended("crash", reason, "stop")
    notice = notices_of(events(*entries), FACTS)[0]
    text = compose([notice], FACTS).text
    assert text.count("What you can do:\n") == 1 and "\x1b" not in text
    assert "<" not in for_slack(text) and "&lt;!channel&gt; &amp;" in for_slack(text)
    long = compose(notices_of(events(*ended("crash", "x" * 10**6, "stop")), FACTS), FACTS)
    assert len(long.text) < 4000 and len(long.document) < 9000


def test_many_held_back_events_are_one_short_message() -> None:
    many = [entry for _ in range(40) for entry in (end("crash"), acted("relaunch", "crash"))]
    notices = notices_of(events(*many, end("crash"), acted("stop", "crash", 1)), FACTS)
    message = compose(notices, FACTS)
    assert "41 events of gpt-7f3a, the newest last:" in message.text
    assert "Earlier: 33 x restarted" in message.text and len(message.text) <= 3500
    assert message.subject == (
        "[hpctrain] gpt-7f3a has FAILED and will not start again by itself: crash (and 40 earlier)"
    )


# -- When messages are sent: quiet hours with changes of the clock, and the rate ---------------


BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = NotifySettings(
    channels=(),
    on=("failed", "restarted"),
    quiet_minutes=(22 * 60, 7 * 60),
    time_zone="Europe/Berlin",
    even_at_night=("failed",),
    most_messages=2,
)


def clock(text: str, fold: int = 0, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def quiet(*hours: int) -> NotifySettings:
    begin, end = hours
    return NIGHT.model_copy(update={"quiet_minutes": (begin * 60, end * 60)})


@pytest.mark.parametrize(
    ("now", "until"),
    [
        ("2026-01-10T21:59:59", None),
        ("2026-01-10T22:00:00", "2026-01-11T07:00:00"),
        ("2026-01-11T00:00:00", "2026-01-11T07:00:00"),
        ("2026-01-11T06:59:59", "2026-01-11T07:00:00"),
        ("2026-01-11T07:00:00", None),
        # the night has 8 hours, and the one with the clock put back 10
        ("2026-03-28T23:00:00", "2026-03-29T07:00:00"),
        ("2026-10-24T23:00:00", "2026-10-25T07:00:00"),
        ("2026-12-31T23:59:59", "2027-01-01T07:00:00"),
    ],
)
def test_the_end_of_the_quiet_hours(now: str, until: str | None) -> None:
    expected = None if until is None else clock(until)
    assert quiet_until(NIGHT, clock(now)) == expected


def test_the_length_of_a_night_follows_the_clock_on_the_wall() -> None:
    spring, autumn = clock("2026-03-28T22:00"), clock("2026-10-24T22:00")
    assert quiet_until(NIGHT, spring) == spring + 8 * 3600
    assert quiet_until(NIGHT, autumn) == autumn + 10 * 3600


def test_quiet_hours_within_one_day() -> None:
    noon = quiet(12, 14)
    assert quiet_until(noon, clock("2026-01-10T11:59")) is None
    assert quiet_until(noon, clock("2026-01-10T13:00")) == clock("2026-01-10T14:00")


def test_an_end_that_the_clock_has_twice_or_never() -> None:
    """At 3:00 the clock of 25 October goes back to 2:00; on 29 March 2:00 is followed by 3:00."""
    settings = NIGHT.model_copy(update={"quiet_minutes": (60, 150)})  # until 2:30
    first, second = clock("2026-10-25T02:30", 0), clock("2026-10-25T02:30", 1)
    assert second == first + 3600
    assert quiet_until(settings, first - 60) == first
    assert quiet_until(settings, first) is None
    again = clock("2026-10-25T02:10", 1)
    assert quiet_until(settings, again) == second
    spring = quiet_until(settings, clock("2026-03-29T01:30"))
    assert spring is not None and quiet_until(settings, spring) is None


@pytest.mark.parametrize("zone", ["America/New_York", "Australia/Lord_Howe", "UTC", "Asia/Kolkata"])
def test_quiet_hours_end_once_a_day_in_every_zone(zone: str) -> None:
    settings = NIGHT.model_copy(update={"time_zone": zone})
    now = clock("2026-01-01T12:00", zone=ZoneInfo(zone))
    for hour in range(0, 366 * 24, 3):
        until = quiet_until(settings, now + 3600 * hour)
        if until is not None:
            assert now + 3600 * hour < until <= now + 3600 * (hour + 10)
            assert quiet_until(settings, until) is None


def test_a_zone_that_this_machine_does_not_know_keeps_nothing_back() -> None:
    settings = NIGHT.model_copy(update={"time_zone": "Mars/Base"})
    assert quiet_until(settings, clock("2026-01-10T23:00")) is None


def notice(kind: str, time: float = 0.0) -> Notice:
    return Notice(f"{time}-{kind}", NoticeKind(kind), time)


def test_at_night_only_what_may_wake_people() -> None:
    now = clock("2026-01-10T23:00")
    crash, failed = notice("restarted"), notice("failed")
    found = select([crash, failed], NIGHT, now, ())
    assert (found.now, found.next_time) == ((failed,), clock("2026-01-11T07:00"))
    assert select([crash], NIGHT, now, ()).now == ()
    morning = select([crash, crash], NIGHT, clock("2026-01-11T07:00"), ())
    assert (morning.now, morning.next_time) == ((crash, crash), None), "all of it at once"


def test_the_rate_holds_back_and_the_next_message_has_it_all() -> None:
    now = clock("2026-01-10T12:00")
    crash = notice("restarted")
    assert select([crash], NIGHT, now, (now - 10,)).now == (crash,)
    full = select([crash], NIGHT, now, (now - 3000, now - 10))
    assert (full.now, full.next_time) == ((), now + 600)
    assert full.next_time is not None
    later = select([crash, crash], NIGHT, full.next_time, (now - 3000, now - 10))
    assert later.now == (crash, crash)


def test_the_end_of_a_run_is_told_whatever_the_rate_is() -> None:
    now = clock("2026-01-10T12:00")
    crash, failed = notice("restarted"), notice("failed")
    assert select([crash, failed], NIGHT, now, (now - 1,) * 50).now == (crash, failed)
