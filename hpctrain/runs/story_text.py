"""Formats the history of a run."""

from __future__ import annotations

import time

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.page.text import facts, paragraph
from hpctrain.runs.describe import AttemptStory, RunStory
from hpctrain.runs.evaluation_text import evaluation_lines
from hpctrain.runs.notify_text import notice_lines
from hpctrain.runs.software_text import software_lines
from hpctrain.runs.speed_text import speed_lines

# Columns before the texts of an attempt.
_TEXT = 12


def story_lines(story: RunStory) -> list[str]:
    """Format attempts in order, each with its launches, then requests and checkpoints."""
    lines = [f"Run        {story.run_id}"]
    if story.state is not None:
        lines.append(f"State      {story.state}")
    if story.reason:
        lines += _wrapped("Reason     ", story.reason)
    lines.append(f"Directory  {story.directory}")
    for number, attempt in enumerate(story.attempts, 1):
        lines += ["", *_attempt_lines(number, attempt)]
    if story.asked:
        lines += ["", "Requests"]
    for asked in story.asked:
        why = f": {asked.reason}" if asked.reason else ""
        who = asked.user or "somebody"
        lines += _wrapped(f"  {_clock(asked.asked_time)}  ", f"{asked.action} by {who}{why}")
        if asked.answer is None or asked.answer_seconds is None:
            lines.append("    not followed yet")
        else:
            lines += _wrapped(f"    {short_duration(asked.answer_seconds)} later  ", asked.answer)
    lines += ["", "Checkpoints"]
    for checkpoint in story.checkpoints:
        size = "-" if checkpoint.total_bytes is None else short_bytes(checkpoint.total_bytes)
        lines.append(f"  step {checkpoint.step:,}   {size}   {checkpoint.problem or 'good'}")
    if not story.checkpoints:
        lines.append("  none")
    if story.notices:
        lines += ["", *notice_lines(story.notices)]
    if story.evaluations:
        lines += ["", "Evaluations", *evaluation_lines(story.evaluations)]
    if story.software:
        lines += ["", *software_lines(story.software)]
    if story.software_changes:
        lines += ["", "Software has changed"]
    for change in story.software_changes:
        lines.append(f"  with launch {change.epoch}")
        lines += [f"    {text}" for text in change.changes]
    if story.speed is not None:
        lines += ["", *speed_lines(story.speed)]
    if story.tracking:
        lines += ["", "Curves", *(f"  {command}" for command in story.tracking)]
    return lines


def _attempt_lines(number: int, attempt: AttemptStory) -> list[str]:
    job = f"job {attempt.job_id}, restart {attempt.restart_count}"
    lines = [f"Attempt {number}  {_clock(attempt.start_time)}   {job}   nodes {attempt.nodes}"]
    lines += facts(("  placed", attempt.placement), margin=_TEXT)
    for line in attempt.placement_details:
        lines += _detail(line)
    for launch in attempt.launches:
        steps = f"from step {launch.resume_step}"
        if launch.last_step is not None:
            steps += f" to {launch.last_step}, newest checkpoint {launch.checkpoint_step or 'none'}"
        seconds = "" if launch.seconds is None else f"   {short_duration(launch.seconds)}"
        lines.append(f"  launch {launch.epoch}  {steps}{seconds}")
        if launch.cause:
            lines += facts(("  ended", f"{launch.cause}: {launch.reason}"), margin=_TEXT)
        for line in launch.evidence:
            lines += _detail(line)
    then = attempt.action and f"{attempt.action}: {attempt.reason}"
    return lines + facts(
        ("  signals", ", ".join(attempt.signals)),
        ("  stopped", attempt.stop_time),
        ("  tracking", attempt.tracking_failure),
        ("  metrics", attempt.metrics_failure),
        ("  then", then),
        margin=_TEXT,
    )


def _detail(text: str) -> list[str]:
    return paragraph(text, f"{'':{_TEXT}}| ", hang=_TEXT + 2)


def _wrapped(first: str, text: str) -> list[str]:
    return paragraph(text, first, hang=len(first))


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
