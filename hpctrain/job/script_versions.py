"""Finds which scripts the jobs of a run had, and what differs from one to the next.

Belongs here: versions in the order of submissions. Does not belong here: the copies
(`hpctrain.records.kept_scripts`).
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.records.kept_scripts import read_kept_script
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind

_MOST_LINES = 400


class ScriptVersion(BaseModel):
    """One text of the script, and the jobs that were submitted with it one after the other.

    `job_ids` is empty for a script that was edited and not submitted since. `text` is None where no
    copy was kept; `changes` are the lines of a unified diff to the version before.
    """

    model_config = ConfigDict(frozen=True)

    sha256: str
    job_ids: tuple[int, ...]
    text: str | None
    changes: tuple[str, ...] = ()


def script_versions(layout: RunLayout, events: Sequence[Event]) -> tuple[ScriptVersion, ...]:
    """List the versions, oldest first; the newest is what the next job will have.

    Raises OSError when the script of the run cannot be read.
    """
    current = layout.script.read_bytes()
    digest = hashlib.sha256(current).hexdigest()
    used: list[tuple[str, list[int]]] = []
    for event in events:
        if event.script_sha256 is None:
            continue
        if not used or used[-1][0] != event.script_sha256:
            used.append((event.script_sha256, []))
        if event.event is EventKind.SUBMITTED and event.job_id is not None:
            used[-1][1].append(event.job_id)
    if not used or used[-1][0] != digest:
        used.append((digest, []))
    versions: list[ScriptVersion] = []
    for sha256, jobs in used:
        text = read_kept_script(layout, sha256)
        if text is None and sha256 == digest:
            text = current.decode(errors="replace")
        before = versions[-1] if versions else None
        versions.append(
            ScriptVersion(
                sha256=sha256,
                job_ids=tuple(jobs),
                text=text,
                changes=_changes(before.text, text) if before else (),
            )
        )
    return tuple(versions)


def _changes(before: str | None, now: str | None) -> tuple[str, ...]:
    if before is None or now is None:
        return ()
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=2)
    return tuple(list(lines)[2:_MOST_LINES])  # without the names of files
