"""Compare what an old and a new replica answer to the same prompts, greedily.

Greedy answers of one model on the same engine are equal but for rounding, which changes with the
batch; so prompts are short, asked one at a time, and the first tokens are compared. Belongs here:
asking and comparing. Does not belong here: what follows (`decide`), the canary of a replica before
it is ready (`hpctrain.serve.replica`).
"""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

PROMPTS = ("The capital of France is", "1 2 3 4 5 6 7", "def add(a, b):\n    return")
TOKENS = 16
# Rounding may turn one token in a near tie, and all that follow it; two prompts that agree are
# enough to know the weights, the tokenizer and the engine's settings for the same.
MOST_DIFFERENT_PROMPTS = 1
_TIMEOUT_SECONDS = 120.0


class NoAnswerError(Exception):
    """A replica that did not answer; nothing is known about its tokens."""


def difference_of(old_url: str, new_url: str, model: str) -> str:
    """What differs between the answers of two replicas; empty if they agree.

    Raises NoAnswerError if one of them does not answer.
    """
    different = []
    for prompt in PROMPTS:
        old, new = _answer(old_url, model, prompt), _answer(new_url, model, prompt)
        if old != new:
            different.append(f"`{prompt[:24]}` was continued by {old[:40]!r}, now by {new[:40]!r}")
    return different[0] if len(different) > MOST_DIFFERENT_PROMPTS else ""


def _answer(url: str, model: str, prompt: str) -> str:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS
    )
    asked = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "seed": 0}
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != http.client.OK:
            raise NoAnswerError(f"{url} answered with {answer.status}")
        return str(json.loads(text)["choices"][0]["text"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
        raise NoAnswerError(f"{url} did not answer: {error}") from error
    finally:
        connection.close()
