"""Formats what a run tells people, and how channels have taken it.

Belongs here: sentences and columns. Does not belong here: the answers (`hpctrain.runs.notify`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.page.text import marked

if TYPE_CHECKING:
    from hpctrain.records.supervise_config import NotifySettings
    from hpctrain.runs.notify import ChannelTest, NoticeState


def notice_lines(states: Sequence[NoticeState]) -> list[str]:
    """Sum up what was told in one line, and list what was not sent."""
    sent = [one for one in states if one.state == "sent"]
    words = f"Notices    {len(sent)} sent"
    if sent:
        last = sent[-1]
        words += f", the last: {last.kind}, {_clock(last.event_time)}, {last.channel}"
    lines = [words]
    for one in states:
        if one.state != "sent":
            lines.append(f"  {_clock(one.event_time)}  {state_words(one)}")
    return lines


def state_words(one: NoticeState) -> str:
    """Describe what became of one event on one channel."""
    tries = f", {one.tries} {'try' if one.tries == 1 else 'tries'}" if one.tries else ""
    problem = f": {one.problem}" if one.problem else ""
    return f"{one.channel}  {one.kind} {one.state}{tries}{problem}"


def settings_lines(settings: NotifySettings) -> list[str]:
    """List channels and times; a secret is shown by its source only."""
    lines = []
    for channel in settings.channels:
        source = channel.url_file
        where = f"address in {source}" if source else f"to {', '.join(channel.to)}"
        lines.append(f"{channel.name:<10}{where}")
    lines.append(f"{'events':<10}{', '.join(settings.on)}")
    if settings.quiet_minutes is not None:
        begin, end = (f"{minutes // 60:02d}:{minutes % 60:02d}" for minutes in
                      settings.quiet_minutes)  # fmt: skip
        night = ", ".join(settings.even_at_night)
        but = f", but for {night}" if night else ""
        lines.append(f"{'quiet':<10}{begin}-{end} {settings.time_zone}{but}")
    return lines


def answer_lines(tests: Sequence[ChannelTest]) -> list[str]:
    """Say how each channel has taken the test."""
    lines: list[str] = []
    for one in tests:
        state = "works" if one.problem is None else "fails"
        lines += marked(state, f"{one.channel}: {one.problem or one.answer}")
    return lines


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
