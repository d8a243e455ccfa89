"""What a run does to files: one row per place of the run directory and kind of event.

The counts are those of the code named in `source`. tests/engines/test_footprint_measured.py and
tests/slurm/test_footprint_on_slurm.py compare them with what strace sees: a change of that code
that changes a count is a change of its row. Belongs here: rows and their sources. Does not
belong here: how often events happen (`predict`), what Slurm is asked (`slurm_rows`).
"""

from __future__ import annotations

from hpctrain.plan.footprint.metrics_rows import METRICS_ROWS
from hpctrain.plan.footprint.notice_rows import NOTICE_ROWS
from hpctrain.plan.footprint.quantities import FileRow, Formula
from hpctrain.plan.footprint.script_rows import SCRIPT_ROWS
from hpctrain.plan.footprint.tracking_rows import TRACKING_ROWS

# Snapshots of the run directory that the supervisor takes, and how often it reads times of ranks.
SNAPSHOT_SECONDS = 2.0
RANK_TIMES_SECONDS = 10.0
# Steps per record of rank times; how often a rank that starts looks for a request to stop.
RANK_TIMES_STEPS = 20
# Steps per record of messages between ranks, unless the spec sets it.
MESSAGES_STEPS = 200
STARTUP_POLL_SECONDS = 0.2
# Launches whose stacks are kept.
KEPT_STACKS = 4
_SNAPSHOT = "hpctrain.supervise.evidence.run_dir_snapshot:RunDirReader.read"
_REPORTER = "hpctrain.train.report:Reporter"
_LAUNCH = "hpctrain.supervise.srun_launch:TrainerLauncher"
_LOOP = "hpctrain.train.loop:Loop"
_SUBMIT = "hpctrain.actions.run_directory:write_run_directory"
_EXIT = "hpctrain.store.exit_records:write_exit_record"
_READ_EXITS = "hpctrain.store.exit_records:read_exit_records"
_PACK = "hpctrain.store.old_launches:pack_old_launches"
_PUBLISH = "hpctrain.checkpoints.publish:publish"
_RETIRE = "hpctrain.checkpoints.publish:Retention.retire"
_SAVE = "hpctrain.train.saving.saver:Saver"
_DISCOVER = "hpctrain.checkpoints.discover"
_CONFIRMED = "hpctrain.train.entry:_confirmed"
_RANKS_ONCE = Formula(ranks=1)
_EACH_SNAPSHOT = 1 / SNAPSHOT_SECONDS


# -- once, when the run is submitted -----------------------------------------------------------
_RUN = (
    FileRow(
        "settings",
        "run",
        "submit",
        _SUBMIT,
        inodes=Formula(9, sizes=2),  # eight files and the run's directory itself
        open=Formula(15, sizes=4),
        rename=Formula(8, sizes=2),
        mkdir=Formula(1),
    ),
    FileRow("ledger", "run", "submit", _SUBMIT, inodes=Formula(1), open=Formula(4)),
    FileRow(
        "kept code",  # the directory, the archive and the link; imports from it are not counted
        "run",
        "submit",
        "hpctrain.actions.kept_code:keep_code",
        inodes=Formula(3),
        open=Formula(3),
        stat=Formula(1),
        rename=Formula(2),
        mkdir=Formula(1),
    ),
    *(
        FileRow(
            place,
            "run",
            "submit",
            "hpctrain.store.layout:RunLayout.create",
            inodes=Formula(1),
            mkdir=Formula(1),
        )
        for place in ("requests", "epochs", "exit records", "logs", "stacks", "checkpoints")
    ),
    FileRow("metrics", "run", "rank 0", "hpctrain.train.report:Reporter", inodes=Formula(1)),
    FileRow("saves", "run", "rank 0", "hpctrain.train.report:Reporter", inodes=Formula(1)),
    FileRow("progress", "run", "rank 0", "hpctrain.train.report:Reporter", inodes=Formula(1)),
    FileRow("rank times", "run", "rank 0", "hpctrain.train.report:Reporter", inodes=Formula(1)),
    FileRow("communication", "run", "rank 0", "hpctrain.train.report:Reporter", inodes=Formula(1)),
    FileRow(
        "software",
        "run",
        "rank 0",
        "hpctrain.store.software:write_software",
        inodes=Formula(2, speed_checks=1),
    ),
    FileRow("checkpoints", "run", "rank 0", _PUBLISH, inodes=Formula(1)),  # Megatron's tracker
    FileRow(
        "checkpoints",
        "run",
        "supervisor",
        "hpctrain.checkpoints.resume_shares:write_shares",
        inodes=Formula(1),
    ),
    FileRow("done marker", "run", "rank 0", "hpctrain.train.entry:mark_done", inodes=Formula(1)),
    FileRow(
        "index cache",
        "run",
        "rank 0",
        "hpctrain.train.datasets.index_cache:complete_files",
        inodes=Formula(1, index_files=1),
        # whoever makes an index reads it less often
        open=Formula(index_files=-5 / 4),
        stat=Formula(index_files=-3 / 4),
        rename=Formula(index_files=3 / 4),
        varies=True,  # megatron-core's own
    ),
)
# -- each launch ---------------------------------------------------------------------------------
_SUPERVISOR = (
    FileRow(
        "evaluations",
        "launch",
        "supervisor",
        "hpctrain.supervise.evaluation_jobs:EvaluationThread.start",
        stat=Formula(1),
        varies=True,  # once per attempt
    ),
    FileRow(
        "settings",
        "launch",
        "supervisor",
        _LAUNCH,
        open=Formula(4),
        stat=Formula(5),
        varies=True,
    ),
    FileRow(
        "ledger",
        "launch",
        "supervisor",
        "hpctrain.store.ledger:BufferedLedger",
        open=Formula(16),
        varies=True,
    ),
    FileRow(
        "epochs",
        "launch",
        "supervisor",
        "hpctrain.store.epochs:claim_epoch",
        inodes=Formula(1),
        open=Formula(3),
        rename=Formula(1),
        unlink=Formula(1),
    ),
    FileRow(
        "requests",
        "launch",
        "supervisor",
        "hpctrain.store.requests:read_request",
        open=Formula(4),
        unlink=Formula(4),
        varies=True,
    ),
    FileRow(
        "checkpoints",
        "launch",
        "supervisor",
        "hpctrain.checkpoints.publish:fence_off",
        open=Formula(5),
        stat=Formula(7),
    ),
    FileRow(
        "quarantine",
        "launch",
        "supervisor",
        f"{_DISCOVER}:select_for_resume",
        stat=Formula(1),
        varies=True,
    ),
    FileRow(
        "checkpoints",
        "launch",
        "supervisor",
        f"{_DISCOVER}:good_steps",
        open=Formula(3),
        stat=Formula(1, files=1),  # the newest
    ),
    FileRow("logs", "launch", "supervisor", f"{_LAUNCH}", open=Formula(2), varies=True),
    FileRow("metrics", "launch", "supervisor", _LAUNCH, open=Formula(2), varies=True),
    FileRow("saves", "launch", "supervisor", _LAUNCH, open=Formula(1), varies=True),
    FileRow("skipped data", "launch", "supervisor", _LAUNCH, open=Formula(1), varies=True),
    FileRow("done marker", "launch", "supervisor", _LAUNCH, stat=Formula(3), varies=True),
    FileRow("progress", "launch", "supervisor", _LAUNCH, open=Formula(2), varies=True),
    FileRow(
        "stacks",
        "launch",
        "supervisor",
        "hpctrain.supervise.evidence.stack_files:forget_old_dumps",
        open=Formula(1),
    ),
    FileRow(
        "exit records",
        "launch",
        "supervisor",
        "hpctrain.supervise.evidence.gather:gather",
        open=Formula(3),
        stat=Formula(2),
        varies=True,
    ),
    FileRow(
        "logs",
        "launch",
        "Slurm",
        "hpctrain.render.script:build_script",
        inodes=Formula(2),  # the attempt's directory and job log
        open=Formula(1),
        mkdir=Formula(1),
    ),
    FileRow(
        "logs",
        "launch",
        "Slurm",
        "hpctrain.render.srun_tasks:choose_tasks",
        inodes=Formula(logs=1),
        keeps="until packed",
        open=Formula(logs=1),
    ),
    FileRow(
        "logs",
        "launch",
        "supervisor",
        f"{_LAUNCH}._write_host_file",
        inodes=Formula(located=1),
        open=Formula(located=1),
        stat=Formula(located=1),
        mkdir=Formula(located=1),
        varies=True,  # only where another order of nodes is better
    ),
    # Packing, as much of it as one launch adds: an archive takes several launches.
    FileRow(
        "logs",
        "launch",
        "supervisor",
        _PACK,
        inodes=Formula(archives=1),
        open=Formula(archives=3, logs=1),
        stat=Formula(logs=2),
        rename=Formula(archives=1),
        unlink=Formula(logs=1),
        varies=True,
    ),
    FileRow(
        "exit records",
        "launch",
        "supervisor",
        _PACK,
        open=Formula(1),
        stat=Formula(2),
        unlink=Formula(2),  # with the directory
        varies=True,
    ),
    # ... and its look at what is not packed, at most twice as many launches as are kept.
    FileRow(
        "logs",
        "launch",
        "supervisor",
        "hpctrain.store.old_launches:logs_by_launch",
        open=Formula(2, kept_launches=2),
        stat=Formula(kept_launches=2),
        varies=True,
    ),
    FileRow(
        "exit records",
        "launch",
        "supervisor",
        "hpctrain.store.old_launches:exits_by_launch",
        open=Formula(1, kept_launches=2),
        stat=Formula(kept_launches=2),
        varies=True,
    ),
)
_RANKS = (
    FileRow(
        "settings",
        "launch",
        "each rank",
        "hpctrain.train.entry:main",
        open=Formula(ranks=1),
        stat=Formula(2, ranks=2),
    ),
    FileRow(
        "done marker", "launch", "each rank", "hpctrain.train.entry:main", open=Formula(ranks=1)
    ),
    FileRow(
        "epochs",
        "launch",
        "each rank",
        "hpctrain.train.storage:fence_of",
        open=Formula(ranks=1),
    ),
    FileRow(
        "saves",
        "launch",
        "each rank",
        "hpctrain.train.saving.save_interval:SaveInterval",
        open=Formula(2, ranks=1),
    ),
    FileRow(
        "skipped data",
        "launch",
        "each rank",
        "hpctrain.train.preflight:check",
        open=Formula(1, ranks=1),
    ),
    FileRow(
        "checkpoints",
        "fresh",
        "each rank",
        "hpctrain.train.preflight:check",
        open=Formula(ranks=1),
        stat=Formula(ranks=1),
    ),
    FileRow(
        "stacks",
        "launch",
        "each rank",
        "hpctrain.train.stacks:open_stack_dump",
        inodes=Formula(1),
        keeps="four launches",
        open=Formula(ranks=1),
        stat=Formula(-1, ranks=4),
        mkdir=Formula(ranks=2),
        unlink=Formula(ranks=1),
    ),
    FileRow(
        "software",
        "launch",
        "rank 0",
        "hpctrain.store.software:write_software",
        open=Formula(1),
    ),
    FileRow(
        "software",  # read, and written by a launch before the first step
        "launch",
        "rank 0",
        "hpctrain.store.software_lock:read_lock",
        open=Formula(1),
    ),
    FileRow(
        "metrics",  # a launch without a lock does not look: it writes one
        "resume",
        "rank 0",
        "hpctrain.train.software_agreement:agree_on_software",
        stat=Formula(1),
    ),
    FileRow(
        "software",
        "fresh",
        "rank 0",
        "hpctrain.store.software_lock:write_lock",
        open=Formula(2),  # and software.jsonl, which is not there yet
        rename=Formula(1),
    ),
    FileRow("metrics", "fresh", "rank 0", "hpctrain.train.report:Reporter", open=Formula(2)),
    FileRow(  # before a file is made, whether the run's directory is there
        "settings", "fresh", "rank 0", "hpctrain.train.report:Reporter", stat=Formula(1)
    ),
    FileRow("requests", "launch", "rank 0", _LOOP, stat=Formula(1)),
    FileRow(
        "requests",
        "launch",
        "rank 0",
        "hpctrain.train.startup_stop:StartupStop",
        stat=Formula(start_seconds=1 / STARTUP_POLL_SECONDS),
        varies=True,
    ),
    FileRow(
        "exit records",
        "launch",
        "rank 0",
        _EXIT,
        inodes=Formula(2),  # a directory, and the file of the first node
        keeps="until packed",
        open=Formula(3),
        stat=Formula(4),
        mkdir=Formula(2),
    ),
    FileRow(
        "done marker",
        "launch",
        "rank 0",
        "hpctrain.train.entry:mark_done",
        open=Formula(1),
        rename=Formula(1),
        varies=True,  # once, by the last launch
    ),
    FileRow(
        "checkpoints",
        "launch",
        "rank 0",
        "hpctrain.train.entry:mark_done",
        open=Formula(2),
        stat=Formula(files=1),
        varies=True,  # once, by the last launch
    ),
    FileRow(
        "index cache",
        "launch",
        "each rank",
        "hpctrain.train.datasets.token_samples",  # the library's
        open=Formula(ranks_index_files=9 / 4),
        stat=Formula(2, ranks_index_files=1),
        mkdir=Formula(3),
        varies=True,
    ),
)
_RESUME = (
    FileRow(
        "checkpoints",
        "resume",
        "supervisor",
        f"{_DISCOVER}:select_for_resume",
        open=Formula(2, files=1),
        stat=Formula(files=1),
        varies=True,  # files are opened up to 1 GiB in all
    ),
    FileRow(
        "checkpoints",
        "resume",
        "supervisor",
        "hpctrain.checkpoints.resume_shares:write_shares",
        open=Formula(2),
        stat=Formula(1),
        rename=Formula(1),
    ),
    FileRow(
        "checkpoints",
        "resume",
        "each rank",
        "hpctrain.train.saving.digest_check:start_digest_check",
        open=Formula(3, files=1, ranks=2),
        stat=Formula(files=1, ranks=2),
    ),
    FileRow(
        "checkpoints",
        "resume",
        "each rank",
        "hpctrain.train.engine:Snapshot",
        open=Formula(1, ranks=8),
        stat=Formula(ranks=9),
    ),
)

# -- each checkpoint, each step, each second -------------------------------------------------------
_TRAINING = (
    FileRow(
        "checkpoints",
        "checkpoint",
        "each rank",
        "hpctrain.checkpoints.manifest:write_rank_digests",
        open=Formula(2, ranks=4),
        stat=Formula(1, ranks=1),
        rename=Formula(ranks=1),
        mkdir=Formula(ranks=1),
    ),
    FileRow(
        "checkpoints",
        "checkpoint",
        "rank 0",
        "hpctrain.checkpoints.manifest:remove_rank_digests",
        open=Formula(1),
        stat=Formula(1),
        unlink=Formula(1, ranks=1),
    ),
    FileRow(
        "checkpoints",
        "checkpoint",
        "each rank",
        _SAVE,
        inodes=Formula(1, files=1),
        keeps="the checkpoint",
        open=Formula(1, files=3),  # written, digested, flushed
        stat=Formula(3, ranks=2),
        rename=Formula(1),
        mkdir=Formula(2, ranks=1),
    ),
    FileRow(
        "checkpoints",
        "checkpoint",
        "rank 0",
        _PUBLISH,
        inodes=Formula(1),
        keeps="the checkpoint",
        open=Formula(11),
        stat=Formula(11, files=1),
        rename=Formula(3),
    ),
    FileRow(
        "checkpoints",
        "checkpoint",
        "rank 0",
        _RETIRE,
        open=Formula(unverified=2),
        stat=Formula(kept=1, unverified_files=1),
    ),
    FileRow(
        "checkpoints",
        "checkpoint",
        "rank 0",
        _RETIRE,
        open=Formula(retired=1),
        stat=Formula(retired=2),
        rename=Formula(retired=1),
        unlink=Formula(retired=2, retired_files=1),
    ),
    # Of a run without evaluation jobs; their own files are those of what they run.
    FileRow(
        "evaluations",
        "checkpoint",
        "rank 0",
        "hpctrain.train.saving.evaluated_checkpoints:steps_to_evaluate",
        stat=Formula(1),
    ),
    FileRow("epochs", "checkpoint", "rank 0", _PUBLISH, open=Formula(2)),
    FileRow("settings", "checkpoint", "rank 0", _SAVE, stat=Formula(2)),
    FileRow("requests", "checkpoint", "rank 0", _SAVE, stat=Formula(1)),
    FileRow(
        "saves", "checkpoint", "rank 0", "hpctrain.train.report:Reporter.published", open=Formula(1)
    ),
    FileRow(
        "metrics", "step", "rank 0", "hpctrain.train.report:Reporter.finished_step", open=Formula(1)
    ),
    FileRow("requests", "step", "rank 0", _LOOP, stat=Formula(2)),
    *(
        FileRow(place, "step", "rank 0", source, open=each, rename=each, varies=True)
        for place, source, each in (
            ("rank times", f"{_REPORTER}.rank_times", Formula(1 / RANK_TIMES_STEPS)),
            ("communication", f"{_REPORTER}.communication", Formula(1 / MESSAGES_STEPS)),
        )
    ),
    FileRow(
        "progress",
        "second",
        "rank 0",
        "hpctrain.train.report:Reporter.still_working",
        open=Formula(1),
        rename=Formula(1),
        varies=True,  # at most, and never more often than steps
    ),
)
_WATCHING = tuple(
    FileRow(place, "second", "supervisor", _SNAPSHOT, open=opens, stat=stats, varies=True)
    for place, opens, stats in (
        ("settings", Formula(), Formula(_EACH_SNAPSHOT)),
        ("progress", Formula(_EACH_SNAPSHOT), Formula()),
        ("exit records", Formula(_EACH_SNAPSHOT), Formula()),
        ("epochs", Formula(_EACH_SNAPSHOT), Formula()),
        ("requests", Formula(3 * _EACH_SNAPSHOT), Formula()),
        ("software", Formula(), Formula(_EACH_SNAPSHOT)),
        ("rank times", Formula(1 / RANK_TIMES_SECONDS), Formula()),
    )
)
# -- in addition, if a launch fails: at most, where all ranks can still say something ------------
_FAILURE = (
    FileRow(
        "exit records",
        "failure",
        "each rank",
        _EXIT,
        inodes=Formula(-1, nodes=1),  # that of the first node is counted with the launch
        keeps="until packed",
        open=Formula(-3, ranks=1, nodes=2),
        stat=Formula(-4, ranks=4),
        mkdir=Formula(-2, ranks=2),
    ),
    FileRow(
        "exit records",
        "failure",
        "each rank",
        "hpctrain.store.exit_records:has_left_startup",
        open=_RANKS_ONCE,
        varies=True,  # of ranks that fail before their first step: was the launch stopped?
    ),
    FileRow("settings", "failure", "each rank", _EXIT, stat=Formula(-3, ranks=3)),
    # a check that fails is made again once the run directory is known to be there
    FileRow("checkpoints", "failure", "each rank", _CONFIRMED, open=_RANKS_ONCE, stat=_RANKS_ONCE),
    FileRow("skipped data", "failure", "each rank", _CONFIRMED, open=_RANKS_ONCE),
    FileRow(
        "exit records",
        "failure",
        "agents",
        "hpctrain.store.exit_records:write_agent_record",
        open=Formula(agents=1),  # the file of the ranks of its node
        stat=Formula(agents=4),
        mkdir=Formula(agents=2),
    ),
    FileRow(
        "stacks",
        "failure",
        "each rank",
        "hpctrain.train.stacks:StackDump",
        inodes=Formula(ranks=1),
        keeps="four launches",
    ),
    FileRow(
        "exit records",
        "failure",
        "supervisor",
        _READ_EXITS,
        open=Formula(nodes=2),
        varies=True,
    ),
    FileRow(
        "checkpoints",
        "failure",
        "supervisor",
        "hpctrain.supervise.decision_inputs:assess",
        open=Formula(kept=2),
        stat=Formula(kept_files=1),
        varies=True,  # if the run may have to go back to an older one
    ),
    FileRow(
        "node checks",
        "failure",
        "supervisor",
        "hpctrain.supervise.evidence.node_checks:check_directory",
        open=Formula(nodes=1),
        stat=Formula(nodes=1),
        rename=Formula(nodes=1),
        unlink=Formula(nodes=1),
    ),
    FileRow(
        "exit records",
        "failure",
        "supervisor",
        _PACK,
        open=Formula(-1, nodes=1),
        stat=Formula(-2, nodes=2),
        unlink=Formula(-1, nodes=1),
        varies=True,
    ),
    FileRow(
        "logs",
        "failure",
        "supervisor",
        "hpctrain.supervise.evidence.log_scan:Scanner.logs",
        open=Formula(1, logs=1),
        stat=Formula(logs=1),
        varies=True,
    ),
)
FILE_ROWS: tuple[FileRow, ...] = (
    *_RUN,
    *_SUPERVISOR,
    *_RANKS,
    *_RESUME,
    *_TRAINING,
    *SCRIPT_ROWS,
    *NOTICE_ROWS,
    *_WATCHING,
    *_FAILURE,
    *TRACKING_ROWS,
    *METRICS_ROWS,
)
