"""Expand Slurm's lists of hosts, such as `gpu[001-004,9],login1`. Pure, needs no program.

Belongs here: the brackets of hostlist expressions (slurm.conf(5), NodeName). Does not belong here:
names of nodes that mean something at a site.
"""

from __future__ import annotations

import itertools
import re

_LONGEST = 1_000_000  # hosts of one list: more is a mistake in the text, not a cluster


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand `n[0-2],x` to (n0, n1, n2, x). Raises ValueError for brackets without an end."""
    return tuple(host for part in _split(text) for host in _expanded(part))


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    if text.count("[") != text.count("]"):
        raise ValueError(f"brackets of `{text[:80]}` do not match")
    return [part for part in re.split(r",(?![^\[]*\])", text.strip()) if part]


def _expanded(part: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    choices = [_numbers(one) if index % 2 else [one] for index, one in enumerate(pieces)]
    if sum(map(len, choices)) > _LONGEST:
        raise ValueError(f"too many hosts in `{part[:80]}`")
    return ["".join(names) for names in itertools.product(*choices)]


def _numbers(text: str) -> list[str]:
    found = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        if not dash:
            found.append(first)
            continue
        if not (first.isdecimal() and last.isdecimal()) or int(last) - int(first) > _LONGEST:
            raise ValueError(f"`{text[:80]}` is no range of numbers")
        width = len(first) if first.startswith("0") else 0
        found += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return found
