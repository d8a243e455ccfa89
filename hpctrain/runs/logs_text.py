"""Formats the errors of a launch: what began it, and what followed.

Belongs here: sentences and columns. Does not belong here: reading logs
(`hpctrain.runs.log_errors`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.judge.odd_stacks import ranges
from hpctrain.page.output import coloured
from hpctrain.page.text import paragraph

if TYPE_CHECKING:
    from hpctrain.runs.log_errors import LaunchErrors, LogError

_SHOWN_NODES = 4


def error_lines(found: LaunchErrors) -> Iterator[str]:
    """Format errors, those that follow from others last and without their lines' details."""
    launch = "" if found.epoch is None else f"launch {found.epoch}, "
    yield f"{launch}logs in {found.directory}"
    for error in found.errors:
        yield ""
        cause = error.cause.replace("_", " ")
        head = f"follows: {cause}" if error.follows else cause
        yield coloured(head, None if error.follows else "red") + _whose(error)
        yield from paragraph(error.line, "  ", hang=4)
    if not found.errors:
        yield "no line in them names a cause"
    yield from found.unread


def _whose(error: LogError) -> str:
    if not error.ranks:
        return ""
    count = f"rank {error.ranks[0]}"
    if len(error.ranks) > 1:
        count = f"{len(error.ranks):,} ranks ({ranges(list(error.ranks))})"
    more = len(error.nodes) - _SHOWN_NODES
    nodes = ", ".join(error.nodes[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")
    return f"  {count}" + (f" on {nodes}" if nodes else "")
