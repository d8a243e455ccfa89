"""What one gate is told: where requests come in, whose they may be, and where they go.

Belongs here: the document, and reading the files of tokens and certificates that it names. Secrets
stay in their files and in the memory of the gate. Does not belong here: requests (`gate`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.service_settings import RouterSettings


class GateSettings(BaseModel):
    """The document that the processes of a gate read; `drain_seconds` as in the service's own.

    `router_port` is that of the router on the loopback device, `counters` the file of its counts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    router: RouterSettings
    router_port: int
    counters: str
    drain_seconds: float = 60.0
    most_body_bytes: int = 64 * 2**20


class Tokens:
    """The tokens that are accepted; the file may be replaced at any time.

    Only digests are kept. All of them are compared, each in constant time, so that the time of an
    answer says nothing about any token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._digests: tuple[bytes, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Read the file again if it has changed. Raises InvalidInputError for a useless one."""
        try:
            status = os.stat(self._path)
            seen = status.st_mtime_ns, status.st_size, status.st_ino
            if seen == self._seen:
                return
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise _useless(self._path, f"cannot be read: {error.strerror}") from error
        tokens = [line.strip() for line in lines if line.strip()]
        if not tokens:
            raise _useless(self._path, "has no token")
        self._digests = tuple(hashlib.sha256(token).digest() for token in tokens)
        self._seen = seen

    def client_of(self, authorization: bytes | None) -> bytes | None:
        """The digest of the token in `Authorization: Bearer TOKEN`; None for a wrong one."""
        scheme, _, token = (authorization or b"").partition(b" ")
        presented = hashlib.sha256(token.strip()).digest()
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(digest, presented)
        return presented if known and scheme.lower() == b"bearer" else None


def token_digests(path: Path) -> tuple[str, ...]:
    """SHA-256 (hex) of each token of a file, for a program that compares digests itself.

    Raises InvalidInputError.
    """
    return tuple(digest.hex() for digest in Tokens(path)._digests)


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Make the context of a server; TLS 1.2 is the oldest. Raises InvalidInputError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, certificate, key)
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Use these files from now on. Raises InvalidInputError."""
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        words = f"with the key {key} is no certificate to serve with: {error.reason}"
        raise _useless(certificate, words) from error
    except OSError as error:
        raise _useless(certificate, f"or {key} cannot be read: {error.strerror}") from error


def _useless(path: Path, words: str) -> InvalidInputError:
    return InvalidInputError([Problem(words, str(path))])
