"""One pass after another over a run: each event once per channel, together what was held back."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, Said, ended, fabricate, said

from hpctrain.notify.channels import NotSentError, OutcomeUnknownError
from hpctrain.notify.delivery import Delivery, Sender, deliver
from hpctrain.notify.message_text import Message
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.notices import read_outbox
from hpctrain.records.supervise_config import (
    ChannelSettings,
    NotifySettings,
    SuperviseConfig,
    read_supervise_config,
)

BERLIN = ZoneInfo("Europe/Berlin")
ON = ("started", "restarted", "failed")
CRASH = (
    ended("crash", "boom", "relaunch")[0],
    said(EventKind.ACTION, action="relaunch", cause="crash", reason="again", exit_code=0),
)
STOP = (
    ended("crash", "boom", "stop")[0],
    said(EventKind.ACTION, action="stop", cause="crash", reason="over", exit_code=1),
)


class Post:
    """What was sent, by channel; channels in `down` refuse, those in `slow` take it silently."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.down: set[str] = set()
        self.slow: set[str] = set()
        self.lock = threading.Lock()

    def __call__(
        self, channel: ChannelSettings, message: Message, environment: Mapping[str, str]
    ) -> None:
        if channel.name in self.down:
            raise NotSentError("it is down")
        with self.lock:
            self.sent.append((channel.name, message.text))
        if channel.name in self.slow:
            raise OutcomeUnknownError("no answer, so the message may have arrived")


def clock(hour: int, minute: int = 0) -> float:
    return datetime(2026, 1, 10 + hour // 24, hour % 24, minute, tzinfo=BERLIN).timestamp()


class Told:
    """A run that tells on some channels, and passes over it."""

    def __init__(self, directory: Path, *channels: str, **settings: object) -> None:
        self.run: RunFiles = fabricate(directory)
        self.post = Post()
        told = tuple(ChannelSettings(name=name, kind="slack") for name in channels)
        notify = NotifySettings.model_validate({"channels": told, "on": ON, **settings})
        path = self.run.layout.supervise_config
        config = read_supervise_config(path).model_copy(update={"notify": notify})
        self.config: SuperviseConfig = config
        self.events: list[Event] = []

    def write(self, time: float, *entries: Said) -> None:
        for kind, fields in entries:
            time += 0.01
            self.events.append(Event.model_validate({"event": kind, "time": time, **fields}))

    def look(self, now: float, name: str = "watch") -> Delivery:
        sender = Sender(name, {}, self.post)
        return deliver(self.run.layout, self.config, self.events, sender, now)


def test_many_senders_at_once_tell_each_event_once(tmp_path: Path) -> None:
    told = Told(tmp_path, "slack", "mail")
    now = clock(12)
    told.write(now, *SUBMITTED, STARTED, LAUNCHED, *CRASH, *STOP)
    barrier = threading.Barrier(8)

    def look(number: int) -> None:
        barrier.wait()
        told.look(now + 1, f"sender {number}")

    threads = [threading.Thread(target=look, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for channel in ("slack", "mail"):
        texts = "\n".join(text for name, text in told.post.sent if name == channel)
        for headline in (" has started (", " is started again by itself (", " has FAILED and "):
            assert texts.count(headline) == 1, texts


def test_a_night_is_one_message_in_the_morning(tmp_path: Path) -> None:
    told = Told(
        tmp_path,
        "slack",
        quiet_minutes=(22 * 60, 7 * 60),
        time_zone="Europe/Berlin",
        even_at_night=("failed",),
    )
    told.write(clock(22, 30), *SUBMITTED, STARTED, LAUNCHED, *CRASH)
    for hour in (23, 26, 30):
        assert told.look(clock(hour)) == Delivery((), clock(31))
    assert not told.post.sent and not told.run.layout.notices.exists()
    told.look(clock(31))
    ((_, text),) = told.post.sent
    assert "2 events of" in text and "has started" in text and "again by itself" in text
    told.write(clock(47), *STOP)  # at 23:00 of that day
    told.look(clock(47, 1))
    assert "has FAILED" in told.post.sent[1][1], "even at night"


def test_what_exceeds_the_rate_comes_with_the_next_message(tmp_path: Path) -> None:
    told = Told(tmp_path, "slack", most_messages=2)
    told.write(clock(12), *SUBMITTED, STARTED)
    for minute in range(0, 50, 10):
        told.write(clock(12, minute), *CRASH)
        told.look(clock(12, minute) + 1)
    assert len(told.post.sent) == 2
    waiting = told.look(clock(12, 50))
    assert waiting.next_time == clock(13) + 1
    told.look(clock(13) + 2)
    assert len(told.post.sent) == 3 and "3 events of" in told.post.sent[2][1]
    told.write(clock(13, 5), *CRASH, *STOP)
    told.look(clock(13, 6))
    assert "2 events of" in told.post.sent[3][1] and "has FAILED" in told.post.sent[3][1]


def test_one_channel_is_down_and_only_that_one_is_tried_again(tmp_path: Path) -> None:
    told = Told(tmp_path, "slack", "mail")
    told.post.down = {"slack"}
    told.write(clock(12), *SUBMITTED, STARTED, LAUNCHED, *STOP)
    found = told.look(clock(12) + 1)
    assert [(one.channel, one.problem) for one in found.results] == [
        ("slack", "it is down"),
        ("mail", None),
    ]
    assert found.next_time == clock(12) + 61
    assert told.look(clock(12) + 30).results == ()
    told.post.down = set()
    told.look(clock(12) + 62)
    assert [name for name, _ in told.post.sent] == ["mail", "slack"]
    assert told.post.sent[0][1] == told.post.sent[1][1]
    assert told.look(clock(13)).results == ()


def test_a_sender_that_cannot_record_its_success_is_followed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the message is on its way."""
    told = Told(tmp_path, "slack")
    told.write(clock(12), *SUBMITTED, STARTED, LAUNCHED)

    def full(*words: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpctrain.records.notices.replace_text", full)
        told.look(clock(12) + 1)
        assert told.look(clock(12) + 200).results == (), "it may still be sending"
        told.look(clock(12) + 400)
        told.look(clock(14))
    told.look(clock(20))
    assert len(told.post.sent) == 2 and "may be a repetition" in told.post.sent[1][1]
    records = read_outbox(told.run.layout).of_channel("slack")
    assert [one.state for one in records] == ["sending", "sending"]


def test_a_message_without_an_answer_is_repeated_once_and_says_so(tmp_path: Path) -> None:
    told = Told(tmp_path, "slack")
    told.post.slow = {"slack"}
    told.write(clock(12), *SUBMITTED, STARTED, LAUNCHED)
    first = told.look(clock(12) + 1)
    assert first.next_time == clock(12) + 301
    assert (first.results[0].problem or "").endswith("may have arrived")
    for minutes in range(1, 80 * 60, 10):
        told.look(clock(12) + 1 + 60 * minutes)
    assert len(told.post.sent) == 2
    assert ["may be a repetition" in text for _, text in told.post.sent] == [False, True]


def test_an_answer_to_the_repetition_ends_it(tmp_path: Path) -> None:
    told = Told(tmp_path, "slack")
    told.post.slow = {"slack"}
    told.write(clock(12), *SUBMITTED, STARTED, LAUNCHED)
    told.look(clock(12) + 1)
    told.post.slow, told.post.down = set(), {"slack"}
    told.look(clock(12) + 400)
    told.post.down = set()
    for minutes in range(10, 600, 10):
        told.look(clock(12) + 60 * minutes)
    assert ["may be a repetition" in text for _, text in told.post.sent] == [False, True]


def test_an_empty_record_is_followed_by_a_message_that_may_be_a_repetition(tmp_path: Path) -> None:
    told = Told(tmp_path, "slack")
    told.write(clock(12), *SUBMITTED, STARTED, LAUNCHED)
    told.look(clock(12) + 1)
    (path,) = told.run.layout.notices.iterdir()
    path.write_text("")
    for minutes in range(1, 600, 10):
        told.look(clock(12) + 60 * minutes)
    assert ["may be a repetition" in text for _, text in told.post.sent] == [False, True]


def test_a_clock_that_was_put_back_holds_nothing_up(tmp_path: Path) -> None:
    """Messages of the future are no reason to wait until then."""
    told = Told(tmp_path, "slack", most_messages=2)
    told.write(clock(17), *SUBMITTED, STARTED)
    for minute in (0, 10):
        told.write(clock(17, minute), *CRASH)
        told.look(clock(17, minute) + 1)
    told.write(clock(12), *CRASH)
    told.look(clock(12) + 1)
    assert len(told.post.sent) == 3


def refuse(patch: pytest.MonkeyPatch, number: int) -> None:
    """Nothing can be made in the run directory any more."""

    def away(*words: object, **named: object) -> bool:
        raise OSError(number, os.strerror(number))

    patch.setattr("hpctrain.records.notices.create_exclusive", away)


def test_nothing_is_sent_where_nothing_can_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`watch` begins anew in each pass, and would send it in each."""
    told = Told(tmp_path, "slack")
    told.write(clock(12), *SUBMITTED, STARTED, LAUNCHED, *STOP)
    refuse(monkeypatch, errno.EDQUOT)
    (result,) = told.look(clock(12) + 1).results
    assert told.post.sent == [] and result.unrecorded and result.kinds == ("started", "failed")
    assert "Disk quota exceeded" in (result.problem or "")


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_supervisor_tells_once_that_its_run_has_failed_where_it_cannot_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    told = Told(tmp_path, "slack")
    job = Sender("job 1", {}, told.post, told=set())
    told.write(clock(12), *SUBMITTED, STARTED, LAUNCHED, *STOP)

    def look(seconds: float) -> Delivery:
        return deliver(told.run.layout, told.config, told.events, job, clock(12) + seconds)

    with monkeypatch.context() as patch:
        refuse(patch, number)
        told.post.down = {"slack"}
        assert [one.problem for one in look(1).results][1] == "it is down", "tried again later"
        told.post.down = set()
        for seconds in (62, 400, 4000):
            look(seconds)
        ((_, text),) = told.post.sent
        assert "has FAILED" in text and "has started" not in text
        assert "may be a repetition" in text, "another job may have told it"
    look(5000)
    assert len(told.post.sent) == 2 and "has FAILED" not in told.post.sent[1][1], "the rest"


def test_a_supervisor_tells_its_failure_where_the_records_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(tmp_path, "slack")
    told.write(clock(12), *SUBMITTED, STARTED, LAUNCHED, *STOP)

    def stale(run: object) -> object:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("hpctrain.notify.delivery.read_outbox", stale)
    assert told.look(clock(12) + 1).results[0].unrecorded and told.post.sent == []
    job = Sender("job 1", {}, told.post, told=set())
    for _ in range(2):
        deliver(told.run.layout, told.config, told.events, job, clock(12) + 1)
    assert len(told.post.sent) == 1
