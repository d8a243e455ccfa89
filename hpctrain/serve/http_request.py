"""Ask a program of a service over HTTP: an engine, a replica by its URL, the router.

Belongs here: one request with a time limit. Does not belong here: what is asked, and what follows
from an answer.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


def address_of(url: str) -> tuple[str, int]:
    """Return host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or http.client.HTTP_PORT


def http_request(
    address: tuple[str, int],
    method: str,
    path: str,
    timeout_seconds: float,
    document: Mapping[str, Any] | None = None,
    *,
    token: str | None = None,
    most_bytes: int | None = None,
) -> tuple[int, bytes]:
    """Return status and body of an answer; where none comes in time, 0 and why."""
    headers = {"Content-Type": "application/json"} if document is not None else {}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    body = None if document is None else json.dumps(document)
    connection = http.client.HTTPConnection(*address, timeout=timeout_seconds)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(most_bytes)
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error).encode()
    finally:
        connection.close()
