"""Formats the state of a run and its reasons, in lines of at most 80 columns.

Lines of evidence are not cut.

Belongs here: sentences and columns. Does not belong here: the answers (`hpctrain.runs.why`).
"""

from __future__ import annotations

import textwrap
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.units import short_duration
from hpctrain.judge.causes import Cause
from hpctrain.page.text import paragraph
from hpctrain.runs.page_text import next_lines

if TYPE_CHECKING:
    from hpctrain.runs.policy_preview import CauseBudget
    from hpctrain.runs.why import LastEnd, Why

_WIDTH, _MARGIN, _INDENT = 80, 10, "  "
# The setting of the spec with which the supervisor does what it now only reports.
_SWITCHES = (
    ("would go back", "supervise.rollback.mode: act"),
    ("would avoid", "supervise.exclude_nodes: act"),
    ("would repeat them without", "supervise.exclude_nodes: act"),
)


def why_lines(why: Why, now: float) -> list[str]:
    """Format why a run is in its state and what to type, then what the policy allows and does."""
    job = "" if why.job_id is None else f", job {why.job_id}"
    number = f", attempt {why.attempts}" if why.attempts else ""
    lines = _entry("Run", f"{why.run_id} {why.state}{job}{number}")
    if why.state_reason:
        lines += _entry("Reason", why.state_reason)
    if why.waiting:
        lines += _entry("Waits", why.waiting)
    if why.placement:
        lines += _entry("Placed", why.placement)
    for request in why.requests:
        lines += _entry("Asked", f"{request}; not followed yet")
    lines += _end_lines(why.ended, now)
    if why.state.over:
        lines += next_lines(Path(why.directory), why.state.value, _MARGIN, explained=True)
    for index, line in enumerate(why.ended.evidence if why.ended else ()):
        lines.append(f"{'' if index else 'Evidence':<{_MARGIN}}| {line}")
    if action := why.action:
        done = action.action
        if action.reason != why.state_reason:
            done += f": {action.reason}"
        lines += _entry("Done", f"{done}{_after(action.delay_seconds)}")
        if action.result:
            lines += _entry("  answer", action.result)
        if action.excluded:
            lines += _entry("  avoids", ", ".join(action.excluded))
        for observation in action.observed:
            lines += _entry("Observed", _observed(observation))
    if not why.state.over:
        lines += _entry("Goes on", f"{why.continuation}: {why.continuation_words}")
    lines += ["", "Policy", *_budget_lines(why)]
    if why.foresight:
        when = "after `hpctrain resume`, when" if why.state.over else "when"
        lines += ["", f"Next, {when}"]
    for one in why.foresight:
        lines += _paragraph(", ".join(one.conditions), _INDENT)
        text = f"{one.action}: {one.reason}{_after(one.delay_seconds)}"
        lines += _paragraph(text, f"{_INDENT}  -> ")
        for observation in one.observed:
            lines += _paragraph(f"observed: {_observed(observation)}", f"{_INDENT}     ")
    return lines


def _end_lines(ended: LastEnd | None, now: float) -> list[str]:
    if ended is None:
        return _entry("Ended", "no launch has ended yet")
    launch = "the attempt was lost" if ended.epoch is None else f"launch {ended.epoch}"
    ago = short_duration(max(0.0, now - ended.end_time))
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended.end_time))
    lines = _entry("Ended", f"{launch}, {clock}, {ago} ago")
    lines += _entry("  cause", f"{_words(ended.cause)}: {ended.reason}")
    suspect = [
        f"rank {ended.rank}" if ended.rank is not None else "",
        f"node {ended.node}" if ended.node else "",
        "hardware beyond doubt" if ended.hard else "",
        f"at step {ended.failed_step:,}" if ended.failed_step is not None else "",
    ]
    if any(suspect):
        lines += _entry("  suspect", ", ".join(part for part in suspect if part))
    if ended.stop_time:
        lines += _entry("  stopped", ended.stop_time)
    if ended.launches_alike > 1:
        lines += _entry("  alike", f"the last {ended.launches_alike} launches ended the same way")
    return lines


def _observed(observation: str) -> str:
    """Add the setting that turns an observation into an action."""
    for start, switch in _SWITCHES:
        if observation.startswith(start):
            return f"{observation}; set `{switch}` to have it done"
    return observation


# -- budgets -----------------------------------------------------------------------------------


def _budget_lines(why: Why) -> list[str]:
    newest = "none yet" if why.checkpoint_step is None else f"step {why.checkpoint_step:,}"
    head = f"Budgets: retries without a new checkpoint (newest: {newest}), which fills them up"
    # Only replicas of a service have a budget for ends of their engine.
    if any(budget.cause == Cause.ENGINE_EXIT for budget in why.budgets):
        head = "Budgets: retries without having served for a while, which fills them up"
    lines = textwrap.wrap(head, _WIDTH)
    used = [budget for budget in why.budgets if budget.used]
    for budget in used:
        lines.append(f"  {_words(budget.cause):<18}{_used(budget.used, budget.allowed)}")
    all_used = why.failures_without_progress
    lines.append(f"  {'all together':<18}{_used(all_used, why.failures_allowed)}")
    for allowed, group in groupby(
        sorted((b for b in why.budgets if not b.used), key=_by_allowance), key=_by_allowance
    ):
        count = "no limit" if allowed < 0 else "no retry" if allowed == 0 else f"{allowed} free"
        names = ", ".join(_words(budget.cause) for budget in group)
        lines += _paragraph(names, f"  {count:<18}")
    storm = why.storm
    window = short_duration(storm.window_seconds)
    failures = f"{storm.failures} failure{'' if storm.failures == 1 else 's'}"
    text = f"{failures} in the last {window}; from {storm.threshold} on it waits"
    return [*lines, f"  {'storm':<18}{text}"]


def _by_allowance(budget: CauseBudget) -> int:
    return -1 if budget.allowed is None else budget.allowed


def _used(used: int, allowed: int | None) -> str:
    if allowed is None:
        return f"{used}, as often as it comes"
    spent = "; the next one stops the run" if used == allowed else ""
    return f"{used} of {allowed} used{spent}" if used <= allowed else f"used up ({allowed})"


def _after(delay_seconds: float | None) -> str:
    return f", after {short_duration(delay_seconds)}" if delay_seconds else ""


# -- columns -----------------------------------------------------------------------------------


def _entry(label: str, text: str) -> list[str]:
    return _paragraph(text, f"{label:<{_MARGIN}}")


def _paragraph(text: str, first: str) -> list[str]:
    return paragraph(text, first, hang=len(first))


def _words(cause: str) -> str:
    return cause.replace("_", " ")
