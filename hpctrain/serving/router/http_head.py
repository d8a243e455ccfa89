"""The head of an HTTP/1.1 message: read strictly, written anew. Pure.

Whatever two programs could read in two ways is refused (RFC 9112, section 11.2): the gate and the
router behind it must agree where a request ends. Belongs here: heads. Does not belong here: bodies
and connections (`gate`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_HEAD_BYTES = 64 * 1024
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"/[\x21-\x7e]*")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
# RFC 9110, section 7.6.1: for one connection only; and what the gate answers itself.
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect")
)


class BadHeadError(ValueError):
    """A head that is refused; `status` is the code of the answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Head:
    """Start line and fields in their order; names in lower case."""

    start: tuple[bytes, bytes, bytes]
    fields: tuple[tuple[bytes, bytes], ...]

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key == name]

    def value(self, name: bytes) -> bytes | None:
        """The value of a field that occurs once. Raises BadHeadError if there are several."""
        found = self.values(name)
        if len(found) > 1:
            raise BadHeadError(400, f"more than one {name.decode()}")
        return found[0] if found else None

    @property
    def keeps_alive(self) -> bool:
        """Whether whoever sent the request takes further answers on its connection."""
        words = b",".join(self.values(b"connection")).lower()
        return b"close" not in words and self.start[2] != b"HTTP/1.0"

    def without(self, *names: bytes) -> list[bytes]:
        """The lines of all fields that concern more than one connection, but for `names`."""
        named = b",".join(self.values(b"connection")).lower().split(b",")
        dropped = _HOP_BY_HOP | {name.strip() for name in named} | set(names)
        return [key + b": " + value for key, value in self.fields if key not in dropped]


def parse_request(data: bytes) -> Head:
    """Read the head of a request, without its empty line. Raises BadHeadError."""
    head = _parse(data)
    method, target, version = head.start
    if not _TOKEN.fullmatch(method) or version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadHeadError(400, "not a request of HTTP/1.1")
    if not _TARGET.fullmatch(target):
        raise BadHeadError(400, "not a path")
    return head


def parse_response(data: bytes) -> Head:
    """Read the head of an answer, without its empty line. Raises BadHeadError."""
    head = _parse(data)
    version, status, _ = head.start
    if not version.startswith(b"HTTP/1.") or not status.isdigit() or len(status) != 3:
        raise BadHeadError(502, "not an answer of HTTP/1.1")
    return head


def body_bytes(head: Head) -> int:
    """How long the body of a request is. Raises BadHeadError for what is not said in bytes."""
    if head.values(b"transfer-encoding"):
        raise BadHeadError(411, "send the length of the request (Content-Length)")
    length = head.value(b"content-length")
    if length is None:
        return 0
    if not length.isdigit() or len(length) > 15:
        raise BadHeadError(400, "not a length")
    return int(length)


def _parse(data: bytes) -> Head:
    lines = data.split(b"\r\n")
    words = lines[0].split(b" ", 2)
    if len(words) == 2 and words[0].startswith(b"HTTP/"):
        words.append(b"")  # RFC 9112, section 4: the phrase may be absent
    if len(words) != 3:
        raise BadHeadError(400, "not the first line of a message")
    fields = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BadHeadError(400, "not a field")
        fields.append((name.lower(), value))
    return Head((words[0], words[1], words[2]), tuple(fields))
