"""Put notices into words: a text for chat and mail, and a JSON document for programs. Pure.

One message holds one notice, or several that were held back. Belongs here: words, and the fields of
the document (docs/notifications.md). Does not belong here: what a notice contains (`notices`),
headers and HTTP (`channels`).

A text of a run (a reason is a line of somebody's log) may contain anything: it is made printable,
cut, and for Slack escaped, so that it can ring no bell of a whole channel (`<!channel>`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.base.printable_text import printable_line
from hpctrain.notify.notices import Notice, NoticeKind, RunFacts

# The documentation of Slack's webhooks allows 40,000 characters and cuts at 4,000 on the screen.
_LONGEST_TEXT = 3500
_LONGEST_SENTENCE = 400
# Lines of logs that show a cause.
_MOST_EVIDENCE, _LONGEST_LINE = 3, 160
# So many notices of a message are told in full, the newest ones; the others are counted.
_MOST_IN_FULL = 8
# What has happened, and the state in which the run is then, as `hpctrain status` has it.
_HEADLINES: dict[NoticeKind, tuple[str, str]] = {
    NoticeKind.STARTED: ("has started", "RUNNING"),
    NoticeKind.DONE: ("is DONE", "DONE"),
    NoticeKind.FAILED: ("has FAILED and will not start again by itself", "FAILED"),
    NoticeKind.STOPPED: ("has stopped on request", "STOPPED"),
    NoticeKind.HELD: ("is HELD and waits for a person", "PENDING"),
    NoticeKind.REQUEUED: ("was interrupted and will continue by itself", "PENDING"),
    NoticeKind.RESTARTED: ("has failed and is started again by itself", "RUNNING"),
    NoticeKind.NODE_EXCLUDED: ("avoids nodes from now on", "RUNNING"),
    NoticeKind.ROLLED_BACK: ("goes back to an earlier checkpoint", "RUNNING"),
    NoticeKind.CHECKPOINT_REJECTED: ("does not use one of its checkpoints", "RUNNING"),
    NoticeKind.SLOW_RANK: ("has a slow rank", "RUNNING"),
    NoticeKind.STALLED: ("does not get on", "RUNNING"),
    NoticeKind.WAITING: ("waits in the queue", "PENDING"),
    NoticeKind.DISK_LOW: ("has little disk left", "RUNNING"),
}
_ON_REQUEST = (NoticeKind.HELD, NoticeKind.STOPPED)
_REPEATED = "This message may be a repetition: nobody knows whether the first one has arrived."


class MessageDocument(BaseModel):
    """What a channel of kind webhook gets; a field that is added does not change the version.

    `notices`: see `_notice_document`.
    """

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    test: bool = False
    repeated: bool = False
    run: str
    runs: str
    user: str
    cluster: str
    text: str
    notices: tuple[dict[str, object], ...]


@dataclass(frozen=True)
class Message:
    """One message in all forms; `document` is JSON."""

    subject: str
    text: str
    document: str


def compose(notices: Sequence[Notice], facts: RunFacts, *, repeated: bool = False) -> Message:
    """Write the message about some notices of one run, in the order of their times."""
    assert notices, "nothing to tell"
    ordered = sorted(notices, key=lambda notice: notice.event_time)
    newest = ordered[-1]
    subject = f"[hpctrain] {headline(newest, facts)}"
    if newest.cause and newest.kind not in _ON_REQUEST:
        subject += f": {newest.cause.replace('_', ' ')}"
    if len(ordered) > 1:
        subject += f" (and {len(ordered) - 1} earlier)"
    text = "\n".join(_lines(ordered, facts, repeated))
    document = _document(ordered, facts, _cut(text), repeated=repeated)
    return Message(printable_line(subject, 200), _cut(text), document)


def write_test_message(facts: RunFacts, sender: str) -> Message:
    """Write the message of `hpctrain notify --test`."""
    text = (
        f"This is a test of {facts.run_id} on {facts.cluster}, sent by {facts.user} ({sender}): "
        "messages about runs arrive here."
    )
    document = _document((), facts, text, test=True)
    return Message(f"[hpctrain] test of {facts.run_id}", text, document)


def headline(notice: Notice, facts: RunFacts) -> str:
    return f"{facts.run_id} {_HEADLINES[notice.kind][0]}"


def for_slack(text: str) -> str:
    """Escape what Slack would read as a link, a name or the bell of a channel (its formatting)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _lines(notices: Sequence[Notice], facts: RunFacts, repeated: bool) -> Iterator[str]:
    told, left = notices[-_MOST_IN_FULL:], notices[:-_MOST_IN_FULL]
    if len(notices) > 1:
        yield f"{len(notices)} events of {facts.run_id}, the newest last:"
        yield ""
    if left:
        counts = Counter(notice.kind for notice in left)
        yield "Earlier: " + ", ".join(f"{count} x {kind}" for kind, count in counts.items())
        yield ""
    for number, notice in enumerate(told):
        if number:
            yield ""
        yield from _notice_lines(notice, facts, last=number == len(told) - 1)
    if repeated:
        yield ""
        yield _REPEATED


def _notice_lines(notice: Notice, facts: RunFacts, *, last: bool) -> Iterator[str]:
    job = "" if notice.job_id is None else f", job {notice.job_id}"
    where = f" on {facts.cluster}" if facts.cluster else ""
    yield f"{headline(notice, facts)} ({facts.user}{where}{job})"
    if notice.cause:
        yield _sentence(f"Cause: {notice.cause.replace('_', ' ')}: {notice.reason}")
    elif notice.reason:
        yield _sentence(f"Why: {notice.reason}")
    for line in notice.evidence[:_MOST_EVIDENCE]:
        yield f"  | {printable_line(line, _LONGEST_LINE)}"
    if notice.done:
        yield _sentence(f"Done by itself: {notice.done}")
    if notice.nodes:
        yield _sentence(f"Nodes: {', '.join(notice.nodes)}")
    if notice.step is not None:
        saved = notice.checkpoint_step
        newest = "" if not saved else f", newest checkpoint {saved:,}"
        target = "" if facts.target_step is None else f" of {facts.target_step:,}"
        yield f"Step {notice.step:,}{target}{newest}"
    if last and notice.commands:
        yield "What you can do:"
        yield from (f"  {command}" for command in notice.commands)


def _sentence(text: str) -> str:
    return printable_line(text, _LONGEST_SENTENCE)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 4]} ..."


def _document(
    notices: Sequence[Notice],
    facts: RunFacts,
    text: str,
    *,
    test: bool = False,
    repeated: bool = False,
) -> str:
    return MessageDocument(
        test=test,
        repeated=repeated,
        run=facts.run_id,
        runs=facts.runs,
        user=facts.user,
        cluster=facts.cluster,
        text=text,
        notices=tuple(_notice_document(notice, facts) for notice in notices),
    ).model_dump_json()


def _notice_document(notice: Notice, facts: RunFacts) -> dict[str, object]:
    """One notice for a program; texts of others are made printable, and cut."""
    return {
        "id": notice.notice_id,
        "kind": notice.kind,
        "state": _HEADLINES[notice.kind][1],
        "headline": headline(notice, facts),
        "event_time": notice.event_time,  # in seconds since the epoch
        "job_id": notice.job_id,
        "cause": notice.cause,
        "reason": _sentence(notice.reason),
        "evidence": [
            printable_line(line, _LONGEST_LINE) for line in notice.evidence[:_MOST_EVIDENCE]
        ],
        "done": _sentence(notice.done),
        "step": notice.step,
        "target_step": facts.target_step,
        "checkpoint_step": notice.checkpoint_step,
        "nodes": notice.nodes,
        "commands": notice.commands,
    }
