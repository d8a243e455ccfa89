"""Read addresses and tokens from the files that a channel names.

Belongs here: which files are private enough, and what an address may be. Does not belong here:
which fields there are (`hpctrain.spec.notify`). No error contains what was read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from hpctrain.base.errors import HpctrainError
from hpctrain.records.supervise_config import ChannelSettings

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
