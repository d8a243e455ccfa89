"""One pass after another over a run, and what leaves this machine: no secret, each event once."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from email import message_from_bytes, policy
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, Said, ended, fabricate, said
from webhook_server import PATH, Webhook, sendmail_stand_in, webhook

from hpctrain.base.errors import HpctrainError
from hpctrain.notify import channels
from hpctrain.notify.channels import NotSentError, OutcomeUnknownError, SecretError, send
from hpctrain.notify.delivery import Delivery, Sender, deliver
from hpctrain.notify.message_text import Message, compose, write_test_message
from hpctrain.notify.notices import Notice, NoticeKind, RunFacts
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


# What leaves this machine: requests and mails, and no secret in errors, arguments, variables.


FACTS = RunFacts("gpt-7f3a", "/runs", "ada", "a100x64", 1000)
NOTICE = Notice(
    "1-failed", NoticeKind.FAILED, 1.0, 7, "crash", "rank 1: a <b> ü", ("| b",), "stop: x", 30
)
MESSAGE = compose([NOTICE], FACTS)
SECRET = "verysecretpath"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


def slack(file: Path, **more: object) -> ChannelSettings:
    return ChannelSettings.model_validate(
        {"name": "slack", "kind": "slack", "url_file": str(file), **more}
    )


def problem(channel: ChannelSettings, message: Message = MESSAGE, **environment: str) -> str:
    """The error of a channel that has certainly not told it."""
    return words_of((NotSentError, SecretError), channel, message, environment)


def doubt(channel: ChannelSettings) -> str:
    """The error of a channel that may have told it."""
    words = words_of((OutcomeUnknownError,), channel, MESSAGE, {})
    assert "may have arrived" in words
    return words


def words_of(
    kinds: tuple[type[HpctrainError], ...],
    channel: ChannelSettings,
    message: Message,
    environment: Mapping[str, str],
) -> str:
    """The words of an error; it has no secret in it, and neither has its traceback."""
    with pytest.raises(kinds) as caught:
        send(channel, message, environment)
    error: BaseException | None = caught.value
    assert isinstance(error, HpctrainError)
    words = f"{error} {error.hint}"
    while error is not None:
        assert SECRET not in repr(error), repr(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert SECRET not in words
    return words


def test_slack_gets_an_escaped_text(hook: Webhook, tmp_path: Path) -> None:
    send(slack(hook.file(tmp_path)), MESSAGE, {})
    ((headers, document),) = hook.received
    assert headers["Content-Type"].startswith("application/json") and "Authorization" not in headers
    assert document.keys() == {"text"}
    assert "rank 1: a &lt;b&gt; ü" in document["text"]
    assert "  hpctrain" not in document["text"], "this notice has no commands"


def test_a_webhook_gets_a_document_and_its_token(hook: Webhook, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("verysecretpath-token\n")
    token.chmod(0o600)
    channel = ChannelSettings(
        name="webhook", kind="webhook", url_file=str(hook.file(tmp_path)), token_file=str(token)
    )
    send(channel, MESSAGE, {})
    ((headers, document),) = hook.received
    assert headers["Authorization"] == "Bearer verysecretpath-token"
    assert document["schema_version"] == 1 and document["run"] == "gpt-7f3a"
    (notice,) = document["notices"]
    assert (notice["kind"], notice["state"], notice["cause"]) == ("failed", "FAILED", "crash")
    assert (notice["step"], notice["target_step"], notice["reason"]) == (30, 1000, NOTICE.reason)
    send(channel, write_test_message(FACTS, "test on n1"), {})
    assert hook.received[1][1]["test"] is True and hook.received[1][1]["notices"] == []


@pytest.mark.parametrize("code", [400, 403, 404, 500, 503])
def test_an_error_of_the_server_has_its_code_only(hook: Webhook, tmp_path: Path, code: int) -> None:
    hook.answer = code
    assert f"HTTP {code}" in problem(slack(hook.file(tmp_path)))


def test_a_redirection_is_not_followed(hook: Webhook, tmp_path: Path) -> None:
    hook.answer, hook.location = 302, f"{hook.url}/elsewhere"
    assert "HTTP 302" in problem(slack(hook.file(tmp_path)))
    assert len(hook.received) == 1


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        file = Webhook(unused.getsockname()[1]).file(tmp_path)
        assert "Connection refused" in problem(slack(file))


def test_no_proxy_gets_what_stays_on_this_machine(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read address and token in the clear."""
    with webhook() as proxy:
        for variable in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        for variable in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        send(slack(hook.file(tmp_path)), MESSAGE, {})
        assert (len(hook.received), proxy.received) == (1, [])


def test_https_takes_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CONNECT: the proxy learns the host, and neither path nor token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("https_proxy", proxy)
        for variable in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        seen: list[bytes] = []

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                seen.append(connection.recv(4096))
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        file = tmp_path / "url"
        file.write_text(f"https://hooks.example.org{PATH}\n")
        file.chmod(0o600)
        problem(slack(file))
        thread.join(60)
    assert seen[0].startswith(b"CONNECT hooks.example.org:443 ") and SECRET.encode() not in seen[0]


def test_a_server_that_hangs_delays_no_longer_than_the_limit(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.hold = threading.Event()
    monkeypatch.setattr(channels, "SEND_SECONDS", 2.0)
    assert "no answer within" in doubt(slack(hook.file(tmp_path)))
    assert len(hook.received) == 1, "it has arrived"


def test_a_server_that_closes_the_connection_may_have_the_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        seen: list[bytes] = []

        def take() -> None:
            connection, _ = listener.accept()
            with connection:
                while MESSAGE.text[:20].encode() not in b"".join(seen):
                    seen.append(connection.recv(4096))

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        file = Webhook(listener.getsockname()[1]).file(tmp_path)
        assert "closed the connection without an answer" in doubt(slack(file))
        thread.join(60)


def test_what_has_not_left_in_time_never_leaves(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is looked up for minutes: the caller has given up, and the connection comes."""
    looked_up, found = threading.Event(), socket.create_connection

    def slow(*words: object, **named: object) -> socket.socket:
        looked_up.wait(60)
        return found(*words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_connection", slow)
    monkeypatch.setattr(channels, "SEND_SECONDS", 0.2)
    assert "no answer within" in problem(slack(hook.file(tmp_path)))
    late = [one for one in threading.enumerate() if one.name == "send-slack"]
    looked_up.set()
    for thread in late:
        thread.join(60)
    assert hook.received == []


def test_the_text_of_a_library_is_not_repeated(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(*words: object) -> None:
        raise ValueError(f"URL can't contain control characters: {hook.url}")

    monkeypatch.setattr(channels, "_post", post)
    assert "it could not be sent: ValueError" in problem(slack(hook.file(tmp_path)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"http://hooks.example.org{PATH}", "begins with http://"),
        ("", "is empty"),
        (f"hooks.example.org{PATH}", "no address of a webhook"),
        (f"https://hooks.example.org{PATH}\nanother", "no address of a webhook"),
        (f"https://hooks.example.org:port{PATH}", "no address of a webhook"),
        (f"file://{PATH}", "no address of a webhook"),
        (f"https://[::1{PATH}", "no address of a webhook"),
    ],
)
def test_what_is_no_address(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "url"
    file.write_text(text)
    file.chmod(0o600)
    assert words in problem(slack(file))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o622])
def test_a_file_that_others_can_read_is_refused(hook: Webhook, tmp_path: Path, mode: int) -> None:
    file = hook.file(tmp_path)
    file.chmod(mode)
    words = problem(slack(file))
    assert f"mode {mode:04o}" in words and f"chmod 600 {file}" in words
    assert hook.received == []


def test_a_file_of_the_site_may_be_read_by_a_group(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = hook.file(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    file.chmod(0o640)
    send(slack(file), MESSAGE, {})
    for mode in (0o644, 0o660):
        file.chmod(mode)
        assert f"mode {mode:04o}" in problem(slack(file))


def test_missing_secrets(tmp_path: Path) -> None:
    assert "No such file" in problem(slack(tmp_path / "url"))
    assert "is no file" in problem(slack(tmp_path))
    former = ChannelSettings.model_validate({"name": "slack", "kind": "slack", "url_env": "HOOK"})
    assert "names no file that has the address" in problem(former)


def test_a_mail_has_its_recipients_in_the_text(tmp_path: Path) -> None:
    program = sendmail_stand_in(tmp_path)
    channel = ChannelSettings(
        name="mail", kind="mail", to=("ada@example.org", "grace"), sendmail=str(program)
    )
    send(channel, MESSAGE, {"PATH": os.environ["PATH"], "HOOK": SECRET})
    assert (tmp_path / "argv.txt").read_text().split() == ["-t", "-i"]
    assert SECRET not in (tmp_path / "environ").read_text()
    mail = message_from_bytes((tmp_path / "mail.txt").read_bytes(), policy=policy.default)
    assert (mail["To"], mail["Auto-Submitted"]) == ("ada@example.org, grace", "auto-generated")
    assert mail["Subject"] == MESSAGE.subject and mail["Bcc"] is None
    assert mail.get_content() == MESSAGE.text + "\n"


def test_a_subject_adds_no_header(tmp_path: Path) -> None:
    program = sendmail_stand_in(tmp_path)
    channel = ChannelSettings(name="mail", kind="mail", to=("ada",), sendmail=str(program))
    facts = RunFacts("gpt\nBcc: eve@example.org", "/runs", "ada", "a100x64", 1000)
    send(channel, compose([NOTICE], facts), {})
    assert "\nBcc:" not in (tmp_path / "mail.txt").read_text().partition("\n\n")[0]


def test_a_sendmail_that_fails_or_is_missing(tmp_path: Path) -> None:
    program = sendmail_stand_in(tmp_path, code=75)
    channel = ChannelSettings(name="mail", kind="mail", to=("ada",), sendmail=str(program))
    assert "exit code 75" in problem(channel)
    program.unlink()
    assert "No such file" in problem(channel)


def test_a_sendmail_that_does_not_end_may_have_queued_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sendmail"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(channels, "SEND_SECONDS", 1.2)
    channel = ChannelSettings(name="mail", kind="mail", to=("ada",), sendmail=str(program))
    doubt(channel)
