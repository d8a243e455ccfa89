"""Formats the history of a run."""

from __future__ import annotations

import time

from hpctrain.actions.describe import AttemptStory, RunStory
from hpctrain.cli.software_text import software_lines
from hpctrain.cli.speed_text import speed_lines
from hpctrain.units import short_bytes, short_duration


def story_lines(story: RunStory) -> list[str]:
    """Format attempts in order, each with its launches, then requests and checkpoints."""
    lines = [f"Run        {story.run_id}" + ("   done" if story.done else "")]
    lines.append(f"Directory  {story.directory}")
    for number, attempt in enumerate(story.attempts, 1):
        lines += ["", *_attempt_lines(number, attempt)]
    if story.asked:
        lines += ["", "Requests"]
    for asked in story.asked:
        why = f": {asked.reason}" if asked.reason else ""
        lines.append(
            f"  {_clock(asked.asked_time)}  {asked.action} by {asked.user or 'somebody'}{why}"
        )
        if asked.answer is None or asked.answer_seconds is None:
            lines.append("    not followed yet")
        else:
            lines.append(f"    {short_duration(asked.answer_seconds)} later  {asked.answer}")
    lines += ["", "Checkpoints"]
    for checkpoint in story.checkpoints:
        size = "-" if checkpoint.total_bytes is None else short_bytes(checkpoint.total_bytes)
        lines.append(f"  step {checkpoint.step:,}   {size}   {checkpoint.problem or 'good'}")
    if not story.checkpoints:
        lines.append("  none")
    if story.software:
        lines += ["", *software_lines(story.software)]
    if story.speed is not None:
        lines += ["", *speed_lines(story.speed)]
    return lines


def _attempt_lines(number: int, attempt: AttemptStory) -> list[str]:
    job = f"job {attempt.job_id}, restart {attempt.restart_count}"
    lines = [f"Attempt {number}  {_clock(attempt.start_time)}   {job}   nodes {attempt.nodes}"]
    if attempt.placement:
        lines.append(f"  placed    {attempt.placement}")
    lines += [f"            | {line}" for line in attempt.placement_details]
    for launch in attempt.launches:
        steps = f"from step {launch.resume_step}"
        if launch.last_step is not None:
            steps += f" to {launch.last_step}, newest checkpoint {launch.checkpoint_step or 'none'}"
        seconds = "" if launch.seconds is None else f"   {short_duration(launch.seconds)}"
        lines.append(f"  launch {launch.epoch}  {steps}{seconds}")
        if launch.cause:
            lines.append(f"  ended     {launch.cause}: {launch.reason}")
        lines += [f"            | {line}" for line in launch.evidence]
    if attempt.signals:
        lines.append(f"  signals   {', '.join(attempt.signals)}")
    if attempt.stop_time:
        lines.append(f"  stopped   {attempt.stop_time}")
    if attempt.action:
        lines.append(f"  then      {attempt.action}: {attempt.reason}")
    return lines


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
