"""What leaves this machine: requests and mails, and no secret in errors, arguments, variables."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from email import message_from_bytes, policy
from pathlib import Path

import pytest
from webhook_server import PATH, Webhook, sendmail_stand_in, webhook

from hpctrain.base.errors import HpctrainError
from hpctrain.notify import channels
from hpctrain.notify.channels import NotSentError, OutcomeUnknownError, SecretError, send
from hpctrain.notify.message_text import Message, compose, write_test_message
from hpctrain.notify.notices import Notice, NoticeKind, RunFacts
from hpctrain.records.supervise_config import ChannelSettings

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
