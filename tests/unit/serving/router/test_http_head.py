"""Heads of HTTP messages: what is passed on, and what two programs could read in two ways."""

from __future__ import annotations

import pytest

from hpctrain.serving.router.http_head import (
    BadHeadError,
    body_bytes,
    parse_request,
    parse_response,
)


def request(*fields: str, start: str = "POST /v1/completions HTTP/1.1") -> bytes:
    return "\r\n".join([start, *fields]).encode()


def test_fields_for_one_connection_stay_there() -> None:
    head = parse_request(
        request("Host: n1", "Connection: keep-alive, X-Hop", "X-Hop: 1", "TE: trailers", "A:  b ")
    )
    assert head.without(b"host") == [b"a: b"]
    assert head.keeps_alive


@pytest.mark.parametrize(
    "text",
    [
        request(start="GET http://elsewhere/ HTTP/1.1"),
        request(start="GET /v1/models HTTP/2.0"),
        request(start="GET /v1/models"),
        request(start="G T /v1/models HTTP/1.1"),
        request("Content-Length : 3"),
        request(" folded: yes"),
        request("X: a\x00b"),
        request("X: a\nContent-Length: 3"),
        request("no colon"),
    ],
)
def test_what_is_no_request_is_refused(text: bytes) -> None:
    with pytest.raises(BadHeadError) as refused:
        parse_request(text)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (("Transfer-Encoding: chunked",), 411),
        (("Content-Length: 3", "Transfer-Encoding: chunked"), 411),
        (("Content-Length: 3", "Content-Length: 4"), 400),
        (("Content-Length: +3",), 400),
        (("Content-Length: 0x3",), 400),
        (("Content-Length: -1",), 400),
        (("Content-Length: 1111111111111111",), 400),
    ],
)
def test_a_body_whose_end_is_in_doubt_is_refused(fields: tuple[str, ...], status: int) -> None:
    with pytest.raises(BadHeadError) as refused:
        body_bytes(parse_request(request(*fields)))
    assert refused.value.status == status


def test_the_length_of_a_body() -> None:
    assert body_bytes(parse_request(request("Content-Length: 12"))) == 12
    assert body_bytes(parse_request(request())) == 0


def test_an_answer_needs_no_phrase() -> None:
    assert parse_response(b"HTTP/1.1 200").start[1] == b"200"
    with pytest.raises(BadHeadError):
        parse_response(b"ICY 200 OK")
