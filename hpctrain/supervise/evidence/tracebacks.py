"""Finds the exception with which a Python process ended, in the end of its log.

Belongs here: reading tracebacks. Does not belong here: exceptions that name a cause, which are
signatures of the catalogue (`log_scan`).
"""

from __future__ import annotations

import re

_HEAD = "Traceback (most recent call last):"
# torch 2.4 and newer label the lines of an exception that ends a rank: `[rank3]: Traceback ...`.
_LABEL = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# Below the head: lines of the stack, indented or empty, then the exception at the line's beginning.
_TRACEBACK = re.compile(rf"^{re.escape(_HEAD)}\n(?:[ \t].*\n|\n)+(?P<error>\S.*)", re.MULTILINE)
_MOST_LINES_AFTER = 20


def final_exception(text: str) -> str | None:
    """Return the line of the last traceback that names the exception (CPython Lib/traceback.py).

    None without one, and where more than a few lines follow: that process has gone on.
    """
    if _HEAD not in text:
        return None
    plain = _LABEL.sub("", text)
    found = list(_TRACEBACK.finditer(plain))
    if not found or plain.count("\n", found[-1].end()) > _MOST_LINES_AFTER:
        return None
    return found[-1]["error"].strip()
