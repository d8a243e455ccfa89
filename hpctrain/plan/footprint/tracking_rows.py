"""What the process beside training does to files for TensorBoard and W&B: rows of the table.

Nothing where the spec has no `tracking`. The counts are those of the code named in `source`;
tests/unit/tracking/test_tracking_footprint.py compares them with what strace sees. Belongs here:
these rows. Does not belong here: all others (`file_rows`), how often events happen (`predict`).
"""

from __future__ import annotations

from hpctrain.plan.footprint.quantities import FileRow, Formula

# As often as hpctrain/tracking/follower.py reads metrics and finishes segments.
FOLLOW_SECONDS = 10.0
SEGMENT_SECONDS = 3600.0
_SUPERVISOR = "hpctrain.supervise.side_processes:SideProcess.start"
_FOLLOWER = "hpctrain.tracking.follower:Follower"
_EVENTS = "hpctrain.tracking.event_files:EventFiles"
_SEGMENT = "hpctrain.tracking.wandb_run:WandbRun"
_POLL, _HOUR = 1 / FOLLOW_SECONDS, 1 / SEGMENT_SECONDS

TRACKING_ROWS: tuple[FileRow, ...] = (
    FileRow(
        "tracking",
        "run",
        "submit",
        "hpctrain.actions.run_directory:write_run_directory",
        inodes=Formula(tracked=1),
        open=Formula(tracked=2),
        rename=Formula(tracked=1),
    ),
    # directories, locks, positions and the log of the process
    FileRow(
        "tracking",
        "run",
        "tracking",
        _FOLLOWER,
        inodes=Formula(tracked=2, tensorboard=3, wandb=3),
    ),
    FileRow(
        "tracking",
        "launch",
        "supervisor",
        _SUPERVISOR,
        open=Formula(tracked=1),
        stat=Formula(tracked=1),
        mkdir=Formula(tracked=1),
    ),
    FileRow("settings", "launch", "supervisor", _SUPERVISOR, stat=Formula(tracked=1)),
    FileRow("settings", "launch", "tracking", _FOLLOWER, stat=Formula(tensorboard=1, wandb=1)),
    FileRow("tracking", "launch", "tracking", _FOLLOWER, open=Formula(tracked=1)),
    FileRow(
        "tracking",
        "launch",
        "tracking",
        _EVENTS,
        inodes=Formula(tensorboard=1),
        open=Formula(tensorboard=3),
        stat=Formula(tensorboard=4),
        mkdir=Formula(tensorboard=2),
        varies=True,
    ),
    # an attempt begins and ends with a segment, if there are rows for it
    FileRow(
        "tracking",
        "launch",
        "tracking",
        _SEGMENT,
        inodes=Formula(wandb=4),
        open=Formula(wandb=7),
        stat=Formula(wandb=12),
        rename=Formula(wandb=3),
        unlink=Formula(wandb=1),
        mkdir=Formula(wandb=5),
        varies=True,
    ),
    FileRow(
        "tracking",
        "second",
        "tracking",
        f"{_EVENTS}.write",
        open=Formula(tensorboard=_POLL),
        stat=Formula(tensorboard=_POLL),
        rename=Formula(tensorboard=_POLL),
        varies=True,
    ),
    FileRow(
        "tracking",
        "second",
        "tracking",
        f"{_SEGMENT}.write",
        inodes=Formula(wandb=4 * _HOUR),
        open=Formula(wandb=4 * _HOUR),
        stat=Formula(wandb=8 * _HOUR),
        rename=Formula(wandb=3 * _HOUR),
        unlink=Formula(wandb=_HOUR),
        mkdir=Formula(wandb=3 * _HOUR),
        varies=True,
    ),
    FileRow(
        "metrics",
        "second",
        "tracking",
        "hpctrain.store.metrics_reader:rows_from",
        open=Formula(tensorboard=_POLL, wandb=_HOUR),
        varies=True,
    ),
    FileRow(
        "saves", "second", "tracking", f"{_SEGMENT}.write", open=Formula(wandb=_HOUR), varies=True
    ),
)
