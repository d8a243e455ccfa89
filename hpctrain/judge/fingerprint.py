"""Compare failures: class and text of an error, without what changes between equal ones. Pure.

Belongs here: removing addresses, numbers, paths, ranks, nodes and times.
"""

from __future__ import annotations

import re

from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, Cause

_LONGEST = 160
_WITHOUT = (
    # prefixes: [rank3]:[E1121 05:33:37.123 ProcessGroupNCCL.cpp:607], dmesg, syslog, node names
    (re.compile(r"^\s*(?:\[rank\d+\]:\s*)?(?:\[[EWIF]\d+ [\d:.]+ [^\]\s]*\]\s*)?"), ""),
    (
        re.compile(
            r"\[\w{3} \w{3} {1,2}\d+ [\d:]+ \d{4}\]\s*|^\w{3} {1,2}\d+ [\d:]+ \S+ kernel:\s*"
        ),
        "",
    ),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ][\d:.,]+Z?"), ""),
    (re.compile(r"(?i)\[?\brank[ _]?\d+\]?"), "rank"),
    (re.compile(r"\b(?:on|node|host) [A-Za-z][\w.-]*\d[\w.-]*"), "on node"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"(?:[\w.~-]*/)+[\w.@%+-]*"), "PATH"),
    (re.compile(r"\d+"), "#"),
    (re.compile(r"\s+"), " "),
)


def fingerprint(cause: Cause, text: str) -> str:
    """Compute a text that is equal for equal failures; empty where there is nothing to compare."""
    if cause not in FAILURE_CAUSES | FINAL_CAUSES:
        return ""
    for expression, instead in _WITHOUT:
        text = expression.sub(instead, text[:1000])
    return f"{cause}: {text.strip()[:_LONGEST]}"
