"""HAProxy before the replicas, or before vllm-router: told what is behind through its socket.

It has TLS, tokens and rates. Tried with 2.6 of Debian 12. Belongs here: its configuration, its
process, its places, its counts, and whether the files that it is given can work. Does not belong
here: which replicas answer (`rotation`).
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import math
import os
import signal
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from hpctrain.base import clock
from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.service_records import RouterSettings, ServiceSettings
from hpctrain.serve.replica.life import say
from hpctrain.serve.router.programs import (
    RETRY_AFTER_SECONDS,
    Child,
    Counts,
    Place,
    find_program,
    listen,
)

_CALL_SECONDS = 5.0
_START_SECONDS = 30.0
# A replica that is added counts as ready when HAProxy's own check has found it well.
_ADD_SECONDS = 5.0


def token_digests(path: Path) -> tuple[str, ...]:
    """The SHA-256 (hex) of each token of a file. Raises InvalidInputError for a useless file."""
    try:
        tokens = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise _useless(path, f"cannot be read: {error.strerror}") from error
    if not tokens:
        raise _useless(path, "has no token")
    return tuple(hashlib.sha256(token).hexdigest() for token in tokens)


def require_certificate(certificate: Path, key: Path) -> None:
    """Raise InvalidInputError unless a server can use the certificate with this key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        words = f"with the key {key} is no certificate to serve with: {error.reason}"
        raise _useless(certificate, words) from error
    except OSError as error:
        raise _useless(certificate, f"or {key} cannot be read: {error.strerror}") from error


def _useless(path: Path, words: str) -> InvalidInputError:
    return InvalidInputError([Problem(words, str(path))])


def find_haproxy_before_router(router: RouterSettings) -> str | None:
    """The HAProxy that is to be in front of vllm-router; None where there is none and none needed.

    Raises InvalidInputError without it where the settings ask for what vllm-router has not.
    """
    try:
        return find_program("haproxy", None, router.python)
    except InvalidInputError as error:
        asked = {
            "router.tls": router.certificate,
            "router.token_file": router.token_file,
            "router.rate_limit": router.rate_limit,
        }
        names = [f"`{name}`" for name, value in asked.items() if value is not None]
        if not names:
            return None
        message = f"HAProxy is not on this machine: vllm-router needs it for {', '.join(names)}"
        hint = "install the package haproxy, or link it beside `engine.python`"
        raise InvalidInputError([Problem(message, hint=hint, node_dependent=True)]) from error


class Haproxy:
    """HAProxy; `directory` is private, and on a disk of this node (for its socket)."""

    def __init__(
        self, program: str, settings: ServiceSettings, place: Place, directory: Path
    ) -> None:
        self._program, self._router = program, settings.router
        self._place, self._directory = place, directory
        self._digests_path, self._tls_path = directory / DIGESTS_NAME, directory / TLS_NAME
        self._child: Child | None = None
        self._listener: socket.socket | None = None
        self._places: dict[str, str] = {}
        self._choosing = threading.Lock()
        self._digests: tuple[str, ...] = ()
        self._seen: tuple[object, ...] = ()
        self._last_requests = 0
        self._last_request_at: float | None = None

    @property
    def port(self) -> int:
        """The port that clients reach."""
        assert self._listener is not None, "not started"
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._listener = listen(self._place, self._router)
        self._listener.set_inheritable(True)
        self._write_files()
        self._start_child()

    def problem(self) -> str | None:
        return None if self._child is None else self._child.problem()

    def restart(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._places.clear()
        self._start_child()

    def add(self, url: str) -> bool:
        address = _address(url)
        with self._choosing:  # replicas are added by several threads
            if url in self._places:
                return True
            free = [one for one in place_names() if one not in self._places.values()]
            if not free or address is None:
                return False
            name = self._places[url] = free[0]
        place, (host, port) = f"{BACKEND}/{name}", address
        said = self._say(f"set server {place} addr {host} port {port}")
        self._say(f"set server {place} state ready")
        if said is None:
            self._places.pop(url, None)
            return False
        deadline = clock.monotonic() + _ADD_SECONDS
        while clock.monotonic() < deadline:
            rows = [row for row in self._stats() if row["pxname"] == BACKEND]
            if any(row["svname"] == name and row["status"].startswith("UP") for row in rows):
                return True
            clock.sleep(0.05)
        return self.remove(url) and False

    def remove(self, url: str) -> bool:
        place = self._places.get(url)
        if place is None:
            return True
        # Slurm's next job may have the address at once; what has begun goes on all the same.
        if self._say(f"set server {BACKEND}/{place} state maint") is None:
            return False
        self._places.pop(url, None)
        return True

    def replicas(self) -> frozenset[str] | None:
        if self._say("show version") is None:
            return None
        return frozenset(self._places)

    def counts(self) -> Counts:
        rows = self._stats()
        totals = {row["pxname"]: row for row in rows if row["svname"] == "BACKEND"}
        asked = totals.get(BACKEND, {})
        refused = _number(totals.get(REFUSED, {}), "req_tot")
        limited = _number(totals.get(LIMITED, {}), "req_tot")
        requests = _number(asked, "req_tot") + refused + limited
        if requests > self._last_requests:
            self._last_request_at = clock.now()
        self._last_requests = requests
        return Counts(
            requests=requests,
            failed=_number(asked, "hrsp_5xx"),
            refused=refused,
            limited=limited,
            in_flight=_number(asked, "scur"),
            last_request=self._last_request_at,
        )

    def refresh(self) -> None:
        seen = self._stamps()
        if seen == self._seen:
            return
        self._seen = seen
        router = self._router
        try:
            if router.token_file is not None:
                self._take_tokens(Path(router.token_file))
            if router.certificate is not None and router.key is not None:
                self._take_certificate(Path(router.certificate), Path(router.key))
        except (InvalidInputError, OSError) as error:
            say(f"what was read before holds: {error}")

    def _take_tokens(self, path: Path) -> None:
        digests = token_digests(path)
        self._write_digests(digests)
        new, gone = set(digests) - set(self._digests), set(self._digests) - set(digests)
        changes = [f"add acl {self._digests_path} {digest}" for digest in new]
        changes += [f"del acl {self._digests_path} {digest}" for digest in gone]
        if self._say(*changes) is None:
            self._seen = ()  # once more when it answers
        else:
            self._digests = digests

    def _take_certificate(self, certificate: Path, key: Path) -> None:
        require_certificate(certificate, key)
        lines = f"{certificate.read_text()}\n{key.read_text()}".split("\n")
        text = "\n".join(line for line in lines if line.strip())  # an empty line ends the text
        name = self._tls_path
        said = self._say(f"set ssl cert {name} <<\n{text}\n", f"commit ssl cert {name}")
        if said is None:
            self._seen = ()  # once more when it answers
        elif "Success" not in said:
            raise _useless(certificate, f"is refused by HAProxy: {said.strip()}")

    def stop(self, seconds: float) -> None:
        if self._child is not None:
            # Management Guide, 4: SIGUSR1 closes the listeners and ends when sessions have
            self._child.signal(signal.SIGUSR1)
        if self._listener is not None:
            self._listener.close()
        if self._child is not None and not self._child.ended_within(seconds):
            self._child.kill()

    # -- the process -----------------------------------------------------------------------

    def _stamps(self) -> tuple[object, ...]:
        """What changes when tokens or certificate are replaced."""
        found: list[object] = []
        for name in (self._router.token_file, self._router.certificate, self._router.key):
            with contextlib.suppress(OSError):
                status = os.stat(name or "")
                found += [status.st_mtime_ns, status.st_size, status.st_ino]
        return tuple(found)

    def _write_files(self) -> None:
        """Write the configuration and what it names. Raises InvalidInputError, OSError."""
        router = self._router
        self._seen = self._stamps()
        if router.certificate is not None and router.key is not None:
            # It looks for the key beside the certificate; both stay where they are.
            self._tls_path.symlink_to(router.certificate)
            self._tls_path.with_name("tls.pem.key").symlink_to(router.key)
        if router.token_file is not None:
            self._digests = token_digests(Path(router.token_file))
            self._write_digests(self._digests)
        assert self._listener is not None, "listens before"
        text = configuration(router, self._directory, self._listener.fileno())
        replace_text(self._directory / "haproxy.cfg", text, mode=0o600, durable=False)

    def _write_digests(self, digests: Sequence[str]) -> None:
        text = "".join(f"{digest}\n" for digest in digests)
        replace_text(self._digests_path, text, mode=0o600, durable=False)

    def _start_child(self) -> None:
        """Start it and wait for its socket. Raises InvalidInputError."""
        assert self._listener is not None, "listens before"
        log = self._place.logs / "haproxy.log"
        words = [self._program, "-db", "-f", str(self._directory / "haproxy.cfg")]
        self._child = Child(
            words, log, environment=self._place.environment, descriptors=[self._listener.fileno()]
        )
        deadline = clock.monotonic() + _START_SECONDS
        while self._say("show version") is None:
            problem = self._child.problem()
            if problem is not None or clock.monotonic() > deadline:
                words_of_problem = problem or "haproxy did not answer on its socket"
                raise InvalidInputError([Problem(words_of_problem, str(log))])
            clock.sleep(0.05)

    # -- its socket ------------------------------------------------------------------------

    def _say(self, *commands: str) -> str | None:
        """Give commands to the runtime API; None if it does not answer."""
        answers = []
        for command in commands:
            try:
                with socket.socket(socket.AF_UNIX) as link:
                    link.settimeout(_CALL_SECONDS)
                    link.connect(str(self._directory / SOCKET_NAME))
                    link.sendall(command.encode() + b"\n")
                    parts = []
                    while part := link.recv(65536):
                        parts.append(part)
            except OSError:
                return None
            answers.append(b"".join(parts).decode(errors="replace"))
        return "".join(answers)

    def _stats(self) -> list[dict[str, str]]:
        text = (self._say("show stat") or "").lstrip("# ")
        return list(csv.DictReader(io.StringIO(text))) if "pxname" in text else []


def _number(row: Mapping[str, str], name: str) -> int:
    text = row.get(name) or "0"
    return int(text) if text.isdigit() else 0


def _address(url: str) -> tuple[str, int] | None:
    """The IP address and port of a URL: the runtime API takes no names. None if unknown."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError:
        return None
    address = found[0][4]
    return str(address[0]), int(address[1])


# -- The configuration of HAProxy for one service, as text. Pure --------------------------------
# It needs HAProxy 2.2 or newer (`http-request return`), which Debian has since 11 and Red Hat since
# 9. Replicas are places that exist from the start and are given addresses through the runtime API,
# so nothing is ever reloaded.


BACKEND = "replicas"
# What was not given to a replica: none was ready, or the client was too fast.
REFUSED, LIMITED = "unready", "too-fast"
# `cache_aware` is vllm-router's, which is the only server behind HAProxy then.
_BALANCE = {
    "least_loaded": "leastconn",
    "round_robin": "roundrobin",
    "cache_aware": "roundrobin",
}
# By what is behind. vllm-router's /health fails for one replica that is not healthy, its /readiness
# when none is; and it retries what replicas refuse itself.
_CHECKED_PATH = {"haproxy": "/health", "vllm-router": "/readiness"}
_RETRIED = {
    "haproxy": "conn-failure empty-response 500 502 503 504",
    "vllm-router": "conn-failure empty-response",
}
_PATHS = "/v1/ /tokenize /detokenize /rerank /score /pooling"
_CLOSED_PATHS = "/v1/load_lora_adapter /v1/unload_lora_adapter"
# Requests up to this size can be sent to another replica: they are kept until an answer begins.
BUFFER_BYTES = 512 * 1024
MOST_BODY_BYTES = 64 * 2**20
_CLIENT_PLACES = 32768
# How many replicas there may be at a time.
MOST_REPLICAS = 64
# In the directory of the process.
SOCKET_NAME, TLS_NAME, DIGESTS_NAME = "haproxy.sock", "tls.pem", "token-digests"


def place_names() -> list[str]:
    """The names of the places for replicas, as `server-template` makes them."""
    return [f"replica{number}" for number in range(1, MOST_REPLICAS + 1)]


def configuration(router: RouterSettings, directory: Path, descriptor: int) -> str:
    """Write the configuration; `descriptor` is that of the socket that listens already.

    `directory` has the certificate, with its key beside it, and the digests of tokens.
    """
    tls = "" if router.certificate is None else f" ssl crt {_quoted(directory / TLS_NAME)}"
    front = [
        "frontend clients",
        f"    bind fd@{descriptor}{tls}",
        # The replicas' own view of a client is of no use to them; a client's word even less.
        "    http-request set-header X-Forwarded-For %[src]",
        "    acl dotted path -m sub /. // \\\\ %2e %2E",
        f"    acl api path_beg {_PATHS}",
        f"    acl closed path_beg {_CLOSED_PATHS}",
        "    acl health path /health",
        f"    acl ready nbsrv({BACKEND}) gt 0",
        _answer(200, "health ready", body='{"ready": true}'),
        _answer(503, "health", "no replica is ready yet"),
        _answer(405, "!METH_GET !METH_POST !METH_OPTIONS", "only GET and POST"),
        _answer(404, "dotted or closed or !api", "not a path of this service"),
        f"    acl too_long req.hdr_val(content-length) gt {MOST_BODY_BYTES}",
        _answer(413, "too_long", f"more than {MOST_BODY_BYTES} bytes"),
    ]
    if router.token_file is None:
        front.append("    http-request set-var(txn.client) src")
    else:
        # Digests are compared, so that the time of a comparison says nothing about a token.
        denied = "WWW-Authenticate Bearer"
        front += [
            "    http-request set-var(txn.client) req.hdr(authorization),"
            "regsub(^[Bb]earer[[:space:]]+,),sha2(256),hex,lower",
            f"    acl known var(txn.client) -m str -f {_quoted(directory / DIGESTS_NAME)}",
            '    acl bearer req.hdr(authorization) -m beg -i "bearer "',
            _answer(401, "!known or !bearer", "a valid token is needed", denied),
            "    http-request del-header Authorization",
        ]
    # Backends that answer themselves, so that HAProxy counts what they get.
    again = f"Retry-After {RETRY_AFTER_SECONDS}"
    answering = [f"backend {REFUSED}", _answer(503, "", "no replica is ready yet", again)]
    if router.rate_limit is not None:
        period_seconds = max(1, math.ceil(1 / router.rate_limit))
        most = max(1, math.floor(router.rate_limit * period_seconds))
        front += [
            f"    stick-table type string len 64 size {_CLIENT_PLACES} "
            f"expire {60 + period_seconds}s store gpc0,gpc0_rate({period_seconds}s)",
            "    http-request track-sc0 var(txn.client)",
            # Only what is let through counts, or a client that insists would never get any.
            f"    http-request set-var(txn.too_fast) bool(true) if {{ sc_gpc0_rate(0) ge {most} }}",
            "    acl too_fast var(txn.too_fast) -m bool",
            "    http-request sc-inc-gpc0(0) if !too_fast",
            f"    use_backend {LIMITED} if too_fast",
        ]
        words = f"more than {router.rate_limit:g} requests per second"
        after = f"Retry-After {period_seconds}"
        answering += ["", f"backend {LIMITED}", _answer(429, "", words, after)]
    front += [f"    use_backend {REFUSED} if !ready", f"    default_backend {BACKEND}"]
    sections = [
        [
            "global",
            f"    stats socket {_quoted(directory / SOCKET_NAME)} mode 600 level admin",
            "    stats timeout 1h",
            f"    nbthread {router.processes}",
            f"    tune.bufsize {BUFFER_BYTES}",
            "    ssl-default-bind-options ssl-min-ver TLSv1.2",
        ],
        [
            "defaults",
            "    mode http",
            "    timeout connect 2s",
            "    timeout http-request 60s",
            "    timeout http-keep-alive 180s",
            "    timeout client 30m",
            "    timeout server 30m",
            "    timeout queue 60s",
            "    option http-keep-alive",
            "    option abortonclose",
            # HAProxy's own answers when no replica has one.
            *(
                f"    http-error status {status} content-type application/json string "
                f"{_error_text(status, 'no replica has answered')} hdr Retry-After 1"
                for status in (502, 503, 504)
            ),
        ],
        front,
        [
            f"backend {BACKEND}",
            f"    balance {_BALANCE[router.policy]}",
            "    option httpchk",
            f"    http-check send meth GET uri {_CHECKED_PATH[router.name]}",
            "    option redispatch 1",
            f"    retries {router.retries}",
            f"    retry-on {_RETRIED[router.name]}",
            f"    http-request disable-l7-retry if {{ req.body_size gt {BUFFER_BYTES - 16384} }}",
            "    default-server check inter 2s fall 2 rise 1 init-addr none",
            f"    server-template replica {MOST_REPLICAS} 127.0.0.1:1 disabled",
        ],
        answering,
    ]
    return "\n".join("\n".join(lines) + "\n" for lines in sections)


def _answer(status: int, condition: str, message: str = "", field: str = "", body: str = "") -> str:
    """One line that answers instead of a replica, with an error as the OpenAI API has them."""
    text = _escaped(body) if body else _error_text(status, message)
    line = f"    http-request return status {status} content-type application/json string {text}"
    return line + (f" hdr {field}" if field else "") + (f" if {condition}" if condition else "")


def _error_text(status: int, message: str) -> str:
    text = f'{{"error": {{"message": "{message}", "type": "hpctrain_router", "code": {status}}}}}'
    return _escaped(text)


def _escaped(text: str) -> str:
    return text.replace(" ", "\\ ").replace('"', '\\"')


def _quoted(path: Path) -> str:
    """A word of the configuration (Configuration Manual, 2.2: quoting and escaping)."""
    return '"' + "".join("\\" + c if c in '\\"$' else c for c in str(path)) + '"'
