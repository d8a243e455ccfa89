"""Send one message over one channel: an HTTP request, or a program like sendmail.

Belongs here: the forms of the requests and mails, time limits, what an answer means, and what none
means: a message whose body has left may have arrived; addresses and tokens from private files. Does
not belong here: words (`message_text`), repeating (`delivery`).

No error contains an address or a token: only a code, the name of an error, or the words of the
operating system. A redirection is not followed, because it would take the token along.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from hpctrain.base.errors import HpctrainError
from hpctrain.notify.message_text import Message, for_slack
from hpctrain.records.supervise_config import ChannelSettings, NotifySettings
from hpctrain.version import __version__

# Of a whole try. A server that sends a byte now and then would keep urllib for ever.
SEND_SECONDS = 10.0
_HINTS = {
    401: "it wants a token, or another one",
    403: "the address is not valid any more, or its owner has forbidden it",
    404: "there is no webhook at this address: make a new one",
    410: "the channel has been archived or removed: make a new webhook",
    429: "too many messages: a smaller `at_most`",
}


class NotSentError(HpctrainError):
    """A message was not taken, for certain; the text contains no secret."""


class OutcomeUnknownError(HpctrainError):
    """A message was on its way and nobody has confirmed it; the text contains no secret."""


class _Handover:
    """The moment from which on a message may arrive. Thread-safe.

    Looking up a name may take longer than a try: what has not begun by then never begins.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._given_up = False

    def begin(self) -> None:
        """Allow the message to leave. Raises NotSentError when it is too late."""
        with self._lock:
            if self._given_up:
                raise NotSentError("it was too late to send it")
            self._begun = True

    def error(self, words: str) -> HpctrainError:
        """Build the error of a try that has no answer; nothing leaves after it."""
        with self._lock:
            self._given_up = True
            if self._begun:
                return OutcomeUnknownError(f"{words}, so the message may have arrived")
            return NotSentError(words)


def send(channel: ChannelSettings, message: Message, environment: Mapping[str, str]) -> None:
    """Send within `SEND_SECONDS`. Raises NotSentError, OutcomeUnknownError, SecretError."""
    failed: list[HpctrainError] = []
    handover = _Handover()

    def attempt() -> None:
        try:
            if channel.kind == "mail":
                _mail(channel, message, environment, handover)
            else:
                _post(channel, message, handover)
        except (NotSentError, SecretError) as error:
            failed.append(error)
        except Exception as error:  # texts of libraries may contain the address
            failed.append(handover.error(_safe_words(error)))

    thread = threading.Thread(target=attempt, daemon=True, name=f"send-{channel.name}")
    thread.start()
    thread.join(SEND_SECONDS)
    if thread.is_alive():
        raise handover.error(f"no answer within {SEND_SECONDS:.0f} s")
    if failed:
        raise failed[0]


def _safe_words(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, Exception) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {SEND_SECONDS:.0f} s"
    if isinstance(cause, ConnectionResetError):  # http.client.RemoteDisconnected is one, too
        return "the server has closed the connection without an answer"
    if isinstance(cause, subprocess.TimeoutExpired):
        return f"{cause.cmd[0]} does not end"
    if isinstance(cause, OSError) and cause.strerror:
        return f"it could not be sent: {cause.strerror}"
    return f"it could not be sent: {type(cause).__name__}"


def _post(channel: ChannelSettings, message: Message, handover: _Handover) -> None:
    import urllib.error
    import urllib.request

    class NoRedirection(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *words: object) -> None:
            return None

    body = message.document
    if channel.kind == "slack":
        body = json.dumps({"text": for_slack(message.text)})
    data = body.encode()

    def leaving() -> Iterator[bytes]:
        """The body, which http.client takes when it is connected and has sent the headers."""
        handover.begin()
        yield data

    headers = {
        "Content-Type": "application/json; charset=utf-8",
        "Content-Length": str(len(data)),
        "User-Agent": f"hpctrain/{__version__}",
    }
    if (token := token_of(channel)) is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url_of(channel), leaving(), headers, method="POST")
    # https: the default context checks certificate and name; proxies are those of the environment.
    # http is for this machine only (`url_of`): a proxy would get address and token in the clear.
    direct = [urllib.request.ProxyHandler({})] if request.type == "http" else []
    opener = urllib.request.build_opener(NoRedirection(), *direct)
    try:
        opener.open(request, timeout=SEND_SECONDS).close()  # 2xx: whatever else follows
    except urllib.error.HTTPError as error:
        code = error.code
        error.close()
        hint = f" ({_HINTS[code]})" if code in _HINTS else ""
        raise NotSentError(f"the server answers HTTP {code}{hint}") from None


def _mail(
    channel: ChannelSettings,
    message: Message,
    environment: Mapping[str, str],
    handover: _Handover,
) -> None:
    """Hand a mail to sendmail: recipients stand in the text and not in argv (sendmail(8), -t)."""
    from email import policy
    from email.message import EmailMessage
    from email.utils import formatdate

    # Lines of a header are folded late: Python's folding puts a blank before a long subject.
    mail = EmailMessage(policy.default.clone(max_line_length=500))
    mail["To"] = ", ".join(channel.to)
    mail["Subject"] = message.subject
    mail["Date"] = formatdate(localtime=True)
    # RFC 3834: no out-of-office reply comes back.
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text)
    kept = {name: environment[name] for name in ("HOME", "PATH", "LANG", "USER", "TZ")
            if name in environment}  # fmt: skip
    handover.begin()
    try:
        done = subprocess.run(
            [channel.sendmail, "-t", "-i"],
            input=mail.as_bytes(),
            env=kept,
            capture_output=True,
            timeout=SEND_SECONDS - 1.0,
            check=False,
        )
    except OSError as error:
        raise NotSentError(f"{channel.sendmail}: {error.strerror}") from None
    if done.returncode != 0:
        raise NotSentError(f"{channel.sendmail} ends with exit code {done.returncode}")


def channel_problems(settings: NotifySettings) -> Iterator[tuple[int, str, HpctrainError]]:
    """Find what would keep each channel from sending here: its number, the field, the error."""
    for number, channel in enumerate(settings.channels):
        if channel.kind == "mail":
            if not os.access(channel.sendmail, os.X_OK):
                missing = f"{channel.sendmail} is not on this machine, or you may not run it"
                hint = "name the program of this site: `sendmail: PATH`"
                yield number, "sendmail", HpctrainError(missing, hint)
            continue
        for field, read in (("url_file", url_of), ("token_file", token_of)):
            try:
                read(channel)
            except SecretError as error:
                yield number, field, error


# -- Read addresses and tokens from the files that a channel names ------------------------------


_LONGEST_BYTES = 8192
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})


class SecretError(HpctrainError):
    """A secret is missing, or too many people can read it."""


def url_of(channel: ChannelSettings) -> str:
    """Read the address of a webhook. Raises SecretError."""
    text = _from_file(channel.url_file, "the address")
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme not in ("https", "http") or not host or not _is_one_word(text):
        raise SecretError(
            f"{channel.url_file} has no address of a webhook",
            hint="it is one line that begins with https://",
        )
    if parts.scheme == "http" and host not in _THIS_MACHINE:
        raise SecretError(
            f"the address in {channel.url_file} begins with http://",
            hint="messages and address would cross the network in the clear: https:// is needed",
        )
    return text


def token_of(channel: ChannelSettings) -> str | None:
    """Read the token of a webhook; None for one without. Raises SecretError."""
    if channel.token_file is None:
        return None
    text = _from_file(channel.token_file, "the token")
    if not _is_one_word(text):
        raise SecretError(f"{channel.token_file} has no token in it")
    return text


def _is_one_word(text: str) -> bool:
    return all(" " < character < "\x7f" for character in text)


def _from_file(file: str | None, what: str) -> str:
    if file is None:
        raise SecretError(f"the channel of an earlier version names no file that has {what}")
    path = Path(file)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise SecretError(
            f"{path}, which is to have {what}, cannot be read: {error.strerror}",
            hint=f"put {what} into it and run `chmod 600 {path}`",
        ) from None
    try:
        _refuse_readable(path, os.fstat(descriptor))
        data = os.read(descriptor, _LONGEST_BYTES)
    except OSError as error:
        raise SecretError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    text = data.decode("ascii", errors="replace").strip()
    if not text:
        raise SecretError(f"{path}, which is to have {what}, is empty")
    return text


def _refuse_readable(path: Path, found: os.stat_result) -> None:
    """Refuse a file that others can read or change.

    A file of the site, which belongs to somebody else, can only be had by a group.
    """
    if not stat.S_ISREG(found.st_mode):
        raise SecretError(f"{path} is no file")
    own = found.st_uid == os.getuid()
    if found.st_mode & (0o077 if own else 0o027):
        mode = stat.S_IMODE(found.st_mode)
        who = "others" if own else "everybody"
        change = f"`chmod 600 {path}`" if own else f"its owner can run `chmod 640 {path}`"
        raise SecretError(
            f"{path} has mode {mode:04o}: {who} can read or change the secret in it", hint=change
        )
