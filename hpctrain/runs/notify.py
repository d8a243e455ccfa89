"""Tells people about runs from a login node: a pass over all runs, a test, what was sent.

Belongs here: from runs and documents to messages and checks of channels. Does not belong here:
which events are told, sending one message (`hpctrain.notify`), when passes are made (`watch`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.checkpoints.publish import published_steps
from hpctrain.notify.channels import send
from hpctrain.notify.delivery import (
    NoticeResult,
    Sender,
    deliver,
    facts_of,
    is_wanted,
    sender_name,
)
from hpctrain.notify.message_text import write_test_message
from hpctrain.notify.notices import NoticeKind, RunFacts, notices_of
from hpctrain.page.text import Named, Whole, facts, marked
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.notices import EXPIRES_SECONDS, read_outbox
from hpctrain.records.requests import user_name
from hpctrain.records.supervise_config import (
    NotifySettings,
    SuperviseConfig,
    known_supervise_config,
    read_supervise_config,
)

if TYPE_CHECKING:
    from hpctrain.records.supervise_config import NotifySettings
    from hpctrain.runs.watch_rules import DiskSpace


# What a pass spends on sending before it leaves the rest to the next one: cron starts it again.
_PASS_SECONDS = 60.0


# failed: it will be tried again. unknown: it may have arrived, and is repeated once.
NoticeOutcome = Literal["sent", "failed", "unknown", "waits", "given up"]


class ChannelTest(BaseModel):
    """How a channel has taken a test message; `problem` is None if it has."""

    model_config = ConfigDict(frozen=True)

    channel: str
    answer: str
    problem: str | None = None
    hint: str | None = None


class NoticeState(BaseModel):
    """One event of a run that is told, and what has become of it on one channel."""

    model_config = ConfigDict(frozen=True)

    kind: str
    event_time: float
    channel: str
    state: NoticeOutcome
    tries: int
    by: str | None = None
    problem: str | None = None


def send_notices(runs: Sequence[RunFiles], grace_seconds: float = 0.0) -> tuple[NoticeResult, ...]:
    """Send what the supervisors of these runs have not sent.

    Looks only at runs with events of late. A channel that has failed once in a pass is left alone
    for the rest of it, because other runs have the same one.
    """
    sender = Sender(sender_name("watch"), os.environ, grace_seconds=grace_seconds)
    results: list[NoticeResult] = []
    broken: set[tuple[str | None, ...]] = set()
    deadline = clock.monotonic() + _PASS_SECONDS
    for run in runs:
        if clock.monotonic() >= deadline:
            break
        try:
            if clock.now() - run.layout.ledger.stat().st_mtime > EXPIRES_SECONDS:
                continue
            config = known_supervise_config(run.layout.supervise_config)
            if config is None or config.notify is None:
                continue
            # Where each leads, without reading its secret.
            channels = {
                (one.kind, one.url_file, one.sendmail): one.name for one in config.notify.channels
            }
            skipped = frozenset(name for key, name in channels.items() if key in broken)
            events = run.ledger.events()
            found = deliver(run.layout, config, events, sender, clock.now(), skipped).results
        except (OSError, HpctrainError):
            continue  # the pass itself reports what cannot be read
        results += found
        failed = {one.channel for one in found if one.problem is not None and not one.unrecorded}
        broken |= {key for key, name in channels.items() if name in failed}
    return tuple(results)


def disk_space(run: RunLayout, config: SuperviseConfig) -> DiskSpace | None:
    """Measure what is left for a run that tells about it; None for others, and before a save."""
    from hpctrain.runs.watch_rules import DiskSpace

    if config.notify is None or NoticeKind.DISK_LOW not in config.notify.on:
        return None
    try:
        newest = max(published_steps(run.checkpoints), default=None)
        manifest = (
            None if newest is None else read_manifest(run.checkpoints / checkpoint_name(newest))
        )
        found = os.statvfs(run.checkpoints)
    except (OSError, HpctrainError):
        return None
    if manifest is None:
        return None
    return DiskSpace(found.f_bavail * found.f_frsize, manifest.total_bytes)


# -- looking -----------------------------------------------------------------------------------


def notice_states(run: RunFiles, now: float | None = None) -> list[NoticeState]:
    """List what the run has told or is to tell, per event and channel, the oldest event first.

    Events that were never sent and are no news any more are left out. Raises OSError.
    """
    config = known_supervise_config(run.layout.supervise_config)
    if config is None or config.notify is None:
        return []
    now = clock.now() if now is None else now
    outbox, facts = read_outbox(run.layout), facts_of(run.layout, config)
    states = []
    for notice in notices_of(run.ledger.events(), facts):
        for channel in config.notify.channels:
            tries = outbox.tries(notice.notice_id, channel.name)
            wanted = is_wanted(notice, config.notify, now)
            if not tries.records and not wanted:
                continue
            last = tries.records[-1] if tries.records else None
            state: NoticeOutcome = "waits" if wanted else "given up"
            if tries.sent:
                state = "sent"
            elif tries.given_up:
                state = "given up"
            elif last is not None and last.state == "failed" and wanted:
                state = "failed"
            elif last is not None and last.unconfirmed and wanted:
                state = "unknown"
            states.append(
                NoticeState(
                    kind=notice.kind,
                    event_time=notice.event_time,
                    channel=channel.name,
                    state=state,
                    tries=len(tries.records),
                    by=last.by if last is not None else None,
                    problem=last.problem if last is not None else None,
                )
            )
    return states


# -- trying ------------------------------------------------------------------------------------


def try_channels(settings: NotifySettings, facts: RunFacts) -> list[ChannelTest]:
    """Send a test message over every channel, from this machine."""
    message = write_test_message(facts, sender_name("test"))
    found = []
    for channel in settings.channels:
        problem, hint = None, None
        try:
            send(channel, message, os.environ)
        except HpctrainError as error:
            problem, hint = str(error), error.hint
        answer = f"handed to {channel.sendmail}" if channel.kind == "mail" else "accepted"
        found.append(
            ChannelTest(
                channel=channel.name,
                answer="" if problem else answer,
                problem=problem,
                hint=hint,
            )
        )
    return found


def told_by_run(run: RunFiles) -> tuple[NotifySettings, RunFacts]:
    """Read whom a run tells. Raises UsageError where it tells nobody."""
    config = read_supervise_config(run.layout.supervise_config)
    return _told(config.notify), facts_of(run.layout, config)


def told_by_spec(
    spec: Path, profile: str, overrides: Sequence[str], runs: Path
) -> tuple[NotifySettings, RunFacts]:
    """Read whom a run of this spec would tell. Raises UsageError, InvalidInputError."""
    from hpctrain.job.prepare import load_any_inputs
    from hpctrain.job.supervisor_settings import notify_settings
    from hpctrain.spec.notify import joined_notify
    from hpctrain.spec.trainer import TrainerRunSpec

    loaded, site = load_any_inputs(spec, profile, overrides)
    document = loaded.document
    settings = _told(notify_settings(joined_notify(document.notify, site.document.notify)))
    facts = RunFacts(
        run_id=document.name,
        runs=str(runs.absolute()),
        user=user_name(),
        cluster=site.document.name,
        target_step=(
            document.trainer.done.step
            if isinstance(document, TrainerRunSpec)
            else document.train_steps
        ),
    )
    return settings, facts


def _told(settings: NotifySettings | None) -> NotifySettings:
    if settings is None:
        raise UsageError(
            "nobody is told about this run: it has no `notify`",
            hint="docs/notifications.md; `hpctrain explain notify`",
        )
    return settings


# -- Formats what a run tells people, and how channels have taken it ----------------------------


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
    named: list[Named] = []
    for channel in settings.channels:
        source = channel.url_file
        where = f"address in {source}" if source else f"to {', '.join(channel.to)}"
        named.append((channel.name, Whole(where)))
    named.append(("events", Whole(", ".join(settings.on))))
    if settings.quiet_minutes is not None:
        begin, end = (f"{minutes // 60:02d}:{minutes % 60:02d}" for minutes in
                      settings.quiet_minutes)  # fmt: skip
        night = ", ".join(settings.even_at_night)
        but = f", but for {night}" if night else ""
        named.append(("quiet", Whole(f"{begin}-{end} {settings.time_zone}{but}")))
    return facts(*named)


def answer_lines(tests: Sequence[ChannelTest]) -> list[str]:
    """Say how each channel has taken the test."""
    lines: list[str] = []
    for one in tests:
        state = "works" if one.problem is None else "fails"
        lines += marked(state, f"{one.channel}: {one.problem or one.answer}")
    return lines


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
