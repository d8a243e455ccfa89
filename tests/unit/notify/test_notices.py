"""Which event of a ledger is told, and in which words: those that `why` and `describe` print."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, Said, ended, fabricate, said

from hpctrain.notify.message_text import compose, for_slack
from hpctrain.notify.notices import WATCHED, NoticeKind, RunFacts, notices_of
from hpctrain.records.ledger import Event, EventKind
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
