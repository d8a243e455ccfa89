"""Reading a streamed answer: server-sent events of OpenAI's completions and chat.

Belongs here: what an event means, and when it came. Does not belong here: connections (see
`sending`).
"""

from __future__ import annotations

import json
from typing import Any


class AnswerError(Exception):
    """The stream has an event that says the request failed."""


class StreamedAnswer:
    """The pieces of one answer as they come; feed it bytes and the time at which they came."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.reported_tokens: int | None = None
        self._event_seconds: list[float] = []
        self._last_is_empty = False
        self._rest = b""

    @property
    def piece_seconds(self) -> list[float]:
        """Return when each piece came, which is one token where the engine sends each by itself.

        The event that says why the answer ended may have a last token, even one without visible
        text, or none: it counts unless the engine reports fewer tokens.
        """
        reported = self.reported_tokens
        extra = reported is not None and len(self._event_seconds) > reported
        return self._event_seconds[:-1] if extra and self._last_is_empty else self._event_seconds

    @property
    def tokens(self) -> int:
        """Return what the engine counted; the pieces, if it does not say."""
        return len(self._event_seconds) if self.reported_tokens is None else self.reported_tokens

    @property
    def complete(self) -> bool:
        """True once the engine has said that the answer ended by itself: a stream may break off."""
        return self.finish_reason not in (None, "abort", "error")

    def feed(self, data: bytes, seconds: float) -> None:
        """Read what has come. Raises AnswerError for an event that reports a failure."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), seconds)

    def _event(self, text: bytes, seconds: float) -> None:
        if text == b"[DONE]":
            return
        try:
            event: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise AnswerError(f"no JSON: {text[:200]!r}") from error
        if "error" in event:
            raise AnswerError(str(event["error"])[:200])
        usage = event.get("usage")
        if usage:
            self.reported_tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta")
            if delta is not None and "role" in delta:
                continue  # chat begins with whose turn it is, before the first token
            self._event_seconds.append(seconds)
            self._last_is_empty = not (delta if delta is not None else choice.get("text"))
