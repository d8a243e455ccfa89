"""What telling people does to files: one row for the ends of a run, one for each failure.

Belongs here: these rows. Does not belong here: all others (`file_rows`), how often events happen
(`predict`).
"""

from __future__ import annotations

from hpctrain.plan.footprint.quantities import Event, FileRow, Formula

_TOLD: tuple[tuple[Event, int], ...] = (("run", 2), ("failure", 1))
NOTICE_ROWS: tuple[FileRow, ...] = tuple(
    FileRow(
        "notices",
        event,
        "supervisor",
        "hpctrain.store.notices:Outbox",
        inodes=Formula(channels=count),
        # the directory, the file and what is flushed, twice; earlier files are read again
        open=Formula(channels=6 * count),
        rename=Formula(channels=2 * count),
        unlink=Formula(channels=count),
        varies=True,
    )
    for event, count in _TOLD
)
