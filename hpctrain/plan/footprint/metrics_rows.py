"""What the process that exports metrics from a job does to files: rows of the table.

Nothing where the job exports none. The counts are those of the code named in `source`;
tests/unit/observe/test_metrics_footprint.py compares them with what strace sees. Belongs here:
these rows. Does not belong here: all others (`file_rows`), how often events happen (`predict`).
"""

from __future__ import annotations

from hpctrain.plan.footprint.quantities import FileRow, Formula

# As often as hpctrain/cli/attempt_exporter.py reads the run directory.
PASS_SECONDS = 15.0
_SUPERVISOR = "hpctrain.supervise.side_processes:SideProcess"
_OUTLETS = "hpctrain.actions.metrics_outlets:published_endpoint"
_METRICS = "hpctrain.actions.run_metrics:RunMetrics"
_PASS = 1 / PASS_SECONDS

# Opened in each pass: how often, and where.
_OPENED = {
    "ledger": 1,
    "progress": 2,
    "settings": 1,
    "metrics": 2,
    "saves": 1,
    "rank times": 1,
    "communication": 1,
}
_LOOKED_AT = ("ledger", "checkpoints")

METRICS_ROWS: tuple[FileRow, ...] = (
    FileRow(
        "logs",
        "launch",
        "supervisor",
        _SUPERVISOR,
        inodes=Formula(exported=1),
        open=Formula(exported=1),
        stat=Formula(exported=1),
        mkdir=Formula(exported=1),
    ),
    FileRow("settings", "launch", "supervisor", _SUPERVISOR, stat=Formula(exported=1)),
    FileRow(
        "metrics endpoint",
        "launch",
        "exporter",
        _OUTLETS,
        inodes=Formula(endpoint=1),
        open=Formula(endpoint=1),
        rename=Formula(endpoint=1),
        unlink=Formula(endpoint=1),
    ),
    *(
        FileRow(
            place, "second", "exporter", _METRICS, open=Formula(exported=times * _PASS), varies=True
        )
        for place, times in _OPENED.items()
    ),
    *(
        FileRow(place, "second", "exporter", _METRICS, stat=Formula(exported=_PASS), varies=True)
        for place in _LOOKED_AT
    ),
)
