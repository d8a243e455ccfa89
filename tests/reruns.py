"""Tests that may be repeated once when they fail, by name, each with the race that is not ours.

A failure that a repetition hides must be one that the product cannot prevent: a race inside of
Slurm, torch or the kernel, with its source. A test that races with a clock of its own is mended
instead. The end of every run says how many are allowed and which were repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

# Node ids without parameters, such as "tests/slurm/test_watch.py::test_what_is_held": the reason.
ALLOWED: dict[str, str] = {}


def reason_of(node_id: str) -> str | None:
    """Look up why a test may be repeated; None if it may not."""
    return ALLOWED.get(node_id.partition("[")[0])


def mark_allowed(items: Iterable[pytest.Item]) -> None:
    """Mark the listed tests for pytest-rerunfailures."""
    for item in items:
        if reason_of(item.nodeid) is not None:
            item.add_marker(pytest.mark.flaky(reruns=1))


def summary(repeated: Sequence[str]) -> str:
    """Describe what was repeated, in one line for the end of a run."""
    names = sorted(set(repeated))
    text = f"allowed to repeat: {len(ALLOWED)}; repeated: {len(names)}"
    return f"{text}: {', '.join(names)}" if names else text
