"""The configuration of HAProxy for one service, as text. Pure.

It needs HAProxy 2.2 or newer (`http-request return`), which Debian has since 11 and Red Hat since
9. Replicas are places that exist from the start and are given addresses through the runtime API, so
nothing is ever reloaded. Belongs here: the text. Does not belong here: the process and its socket
(`haproxy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.records.service_records import RouterSettings
from hpctrain.serve.router.programs import RETRY_AFTER_SECONDS

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


@dataclass(frozen=True)
class HaproxyFiles:
    """What the configuration names; `descriptor` is that of the socket that listens already.

    Paths: `tls` has its key beside it, as `tls` + `.key`.
    """

    descriptor: int
    socket: str
    tls: str | None
    token_digests: str | None


def place_names() -> list[str]:
    """The names of the places for replicas, as `server-template` makes them."""
    return [f"replica{number}" for number in range(1, MOST_REPLICAS + 1)]


def configuration(files: HaproxyFiles, router: RouterSettings) -> str:
    """Write the configuration."""
    front, back = _front(files, router), _back(router)
    sections = (_global(files, router), _defaults(), front, back, _answering(router))
    return "\n".join("\n".join(lines) + "\n" for lines in sections)


def _global(files: HaproxyFiles, router: RouterSettings) -> list[str]:
    return [
        "global",
        f"    stats socket {_quoted(files.socket)} mode 600 level admin",
        "    stats timeout 1h",
        f"    nbthread {router.processes}",
        f"    tune.bufsize {BUFFER_BYTES}",
        "    ssl-default-bind-options ssl-min-ver TLSv1.2",
    ]


def _defaults() -> list[str]:
    return [
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
        *(_error(status, "no replica has answered") for status in (502, 503, 504)),
    ]


def _front(files: HaproxyFiles, router: RouterSettings) -> list[str]:
    tls = f" ssl crt {_quoted(files.tls)}" if files.tls is not None else ""
    lines = [
        "frontend clients",
        f"    bind fd@{files.descriptor}{tls}",
        # The replicas' own view of a client is of no use to them; a client's word even less.
        "    http-request set-header X-Forwarded-For %[src]",
        "    acl dotted path -m sub /. // \\\\ %2e %2E",
        f"    acl api path_beg {_PATHS}",
        f"    acl closed path_beg {_CLOSED_PATHS}",
        "    acl health path /health",
        f"    acl ready nbsrv({BACKEND}) gt 0",
        *_answer(200, "", "health ready", body='{"ready": true}'),
        *_answer(503, "no replica is ready yet", "health"),
        *_answer(405, "only GET and POST", "!METH_GET !METH_POST !METH_OPTIONS"),
        *_answer(404, "not a path of this service", "dotted or closed or !api"),
        f"    acl too_long req.hdr_val(content-length) gt {MOST_BODY_BYTES}",
        *_answer(413, f"more than {MOST_BODY_BYTES} bytes", "too_long"),
    ]
    if files.token_digests is not None:
        # Digests are compared, so that the time of a comparison says nothing about a token.
        lines += [
            "    http-request set-var(txn.client) req.hdr(authorization),"
            "regsub(^[Bb]earer[[:space:]]+,),sha2(256),hex,lower",
            f"    acl known var(txn.client) -m str -f {_quoted(files.token_digests)}",
            '    acl bearer req.hdr(authorization) -m beg -i "bearer "',
            *_answer(
                401, "a valid token is needed", "!known or !bearer", "WWW-Authenticate Bearer"
            ),
            "    http-request del-header Authorization",
        ]
    else:
        lines.append("    http-request set-var(txn.client) src")
    if router.rate_limit is not None:
        period_seconds = max(1, math.ceil(1 / router.rate_limit))
        most = max(1, math.floor(router.rate_limit * period_seconds))
        lines += [
            f"    stick-table type string len 64 size {_CLIENT_PLACES} "
            f"expire {60 + period_seconds}s store gpc0,gpc0_rate({period_seconds}s)",
            "    http-request track-sc0 var(txn.client)",
            # Only what is let through counts, or a client that insists would never get any.
            f"    http-request set-var(txn.too_fast) bool(true) if {{ sc_gpc0_rate(0) ge {most} }}",
            "    acl too_fast var(txn.too_fast) -m bool",
            "    http-request sc-inc-gpc0(0) if !too_fast",
            f"    use_backend {LIMITED} if too_fast",
        ]
    return [*lines, f"    use_backend {REFUSED} if !ready", f"    default_backend {BACKEND}"]


def _answering(router: RouterSettings) -> list[str]:
    """Backends that answer themselves, so that HAProxy counts what they get."""
    again = f"Retry-After {RETRY_AFTER_SECONDS}"
    lines = [f"backend {REFUSED}", *_answer(503, "no replica is ready yet", "", again)]
    if router.rate_limit is not None:
        words = f"more than {router.rate_limit:g} requests per second"
        after = f"Retry-After {max(1, math.ceil(1 / router.rate_limit))}"
        lines += ["", f"backend {LIMITED}", *_answer(429, words, "", after)]
    return lines


def _back(router: RouterSettings) -> list[str]:
    return [
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
    ]


def _answer(
    status: int, message: str, condition: str, field: str = "", *, body: str = ""
) -> Sequence[str]:
    """One line that answers instead of a replica, with an error as the OpenAI API has them."""
    quoted = _escaped(body) if body else _error_text(status, message)
    header = " hdr " + field if field else ""
    line = f"    http-request return status {status} content-type application/json"
    return [f"{line} string {quoted}{header}" + (f" if {condition}" if condition else "")]


def _error(status: int, message: str) -> str:
    """One line with the answer of HAProxy itself when no replica has one."""
    line = f"    http-error status {status} content-type application/json"
    return f"{line} string {_error_text(status, message)} hdr Retry-After 1"


def _error_text(status: int, message: str) -> str:
    text = f'{{"error": {{"message": "{message}", "type": "hpctrain_router", "code": {status}}}}}'
    return _escaped(text)


def _escaped(text: str) -> str:
    return text.replace(" ", "\\ ").replace('"', '\\"')


def _quoted(text: str) -> str:
    """A word of the configuration (Configuration Manual, 2.2: quoting and escaping)."""
    return '"' + "".join("\\" + c if c in '\\"$' else c for c in text) + '"'
