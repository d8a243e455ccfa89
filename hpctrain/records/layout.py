"""Where everything lies inside a run directory. No path is spelled anywhere else.

Who writes and reads each file, and which versions of it there are: docs/run-directory.md.

spec.yaml profile.yaml plan.json       the resolved documents that were submitted
train.json supervise.json job.sbatch   settings of trainer and supervisor, the script
scripts/0123456789ab.sbatch            each text of the script that was submitted, by its SHA-256
ledger.jsonl                           append-only events: the single truth about attempts
metrics.jsonl                          one object per optimizer step
progress.json                          the trainer's last sign of life
done.json                              the run has reached its target; nothing is to be run
data.json                              which bytes the run trains on, to notice that they changed
control/                               requests of people and of the supervisor to the trainer
epochs/                                one file per launch; the highest number owns the run
prologue.sh container.sh commands.sh   what surrounds the trainer, if the site wants it: what each
                                       task runs before it, what begins its container, and what
                                       runs once for the job and once on each node
exits/e000001/node-000003.jsonl        how the ranks of a node of a launch ended, one line each
exits/e000001/left-startup             a rank of the launch was stopped before its first step
stacks/e000001/rank-000003.txt         where each rank of a launch was when it hung
ranks.json saves.jsonl skips.json      times of each rank, each save and its cost, data left out
software.jsonl                         software and GPUs that each launch has found on its nodes
software.lock                          what the run trains with, by name and version
software/current                       hpctrain as it was submitted: link to hpctrain-0.1.0-1a2b.zip
speed.jsonl                            speed of GPUs and links before the first step of a launch
signatures.json                        the lines of logs and kernels that name a cause, and XIDs
train-n000003.json                     the trainer's file for a launch on fewer nodes than planned
ds_config.json ds_config-n000003.json  DeepSpeed's configuration, for people and its own tools
communication.json                     messages between ranks in one measured step
replica.json                           settings of a replica of a service, instead of train.json
router.json                            settings of a service's router, instead of train.json
drain.json                             how the newest launch of a replica has left
metrics-endpoint.json                  where the running job serves metrics, if it does
traces/e000001-rank-000003-steps-10-12.json.gz  what happened in steps of a rank (`profile:`)
tracking.json tracking/                what goes to TensorBoard and W&B, and their files
evaluation.json evaluation-NAME.sbatch the evaluation jobs of the spec, and the script of each
evaluations.jsonl evaluations.lock     what has happened to them; held by who submits them
evaluations/NAME-12-a1.json            what a command has written about step 12, at its try 1
logs/                                  slurm-JOB.out, JOB.RESTART/stepS-rankT.log, -nodeN.log,
                                       hosts-e000001.txt: nodes of a launch in an order of its own
notices/EVENT.CHANNEL.01               each try to tell people about an event, and how it ended
logs/archive-e000041.tar.gz            logs and exit records of old launches
checkpoints/                           iter_0000012/ and iter_0000012.partial-e000003/
output/launch-000003/ output/newest    what a trainer of one's own has written, by launches
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from hpctrain.base.durable import make_private_directory
from hpctrain.base.errors import StorageError

# The set-group-ID bit: what is made below belongs to the same group.
_GROUP_READS = 0o2750
_GROUP_WRITES = 0o2770
_OF_ROUTER = re.compile(r"router(-g\d{3,})?")


class Place:
    """A path below the directory of a run or of a service: `layout.ledger`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __get__(self, layout: Directory, owner: type | None = None) -> Path:
        return layout.directory / self.path


class Directory(Protocol):
    """What has places."""

    @property
    def directory(self) -> Path: ...


@dataclass(frozen=True)
class RunLayout:
    """The paths of one run directory."""

    directory: Path

    @cached_property
    def run_id(self) -> str:
        """The name of the run and of its jobs; of a part of a service with the service in front.

        A service directory contains run directories: `replicas/r001-g001`, `router`, and
        `router-g002` for the job that follows it.
        """
        name, above = self.directory.name, self.directory.parent
        if above.name == "replicas":
            return f"{above.parent.name}-{name}"
        return f"{above.name}-{name}" if _OF_ROUTER.fullmatch(name) else name

    spec = Place("spec.yaml")
    profile = Place("profile.yaml")
    plan = Place("plan.json")
    train_config = Place("train.json")
    # The settings of a replica; a run that trains has `train_config` instead.
    replica_config = Place("replica.json")
    # The settings of a service's router; a run that trains has `train_config` instead.
    router_config = Place("router.json")
    # How the newest launch of a replica has left the router and ended its requests.
    drain = Place("drain.json")
    supervise_config = Place("supervise.json")
    prologue = Place("prologue.sh")
    container_shell = Place("container.sh")
    commands = Place("commands.sh")
    script = Place("job.sbatch")

    def kept_script(self, sha256: str) -> Path:
        """The copy of a script that was submitted."""
        return self.directory / "scripts" / f"{sha256[:12]}.sbatch"

    ledger = Place("ledger.jsonl")
    metrics = Place("metrics.jsonl")
    progress = Place("progress.json")
    # Which bytes the run trains on.
    data_identity = Place("data.json")
    done = Place("done.json")
    control = Place("control")
    # Exists while the trainer is to save and leave at the next step boundary.
    stop_request = Place("control/stop")
    # Exists while the supervisor is to end the run at once, without a save.
    stop_now_request = Place("control/stop-now")
    # Exists while the run is to save, leave its nodes and be held in the queue.
    hold_request = Place("control/hold")
    # Exists until the trainer has begun the requested save.
    save_request = Place("control/save")
    # Changed when the agents of a trainer of one's own are to have its ranks write their stacks.
    stacks_request = Place("control/stacks")
    signatures = Place("signatures.json")
    software = Place("software.jsonl")
    # What the run trains with; a launch that finds something else says so.
    software_lock = Place("software.lock")
    # Code that the run keeps for itself.
    kept_software = Place("software")
    # A link to the archive of hpctrain's code that the next attempt imports.
    current_code = Place("software/current")
    # What was not committed in the engine's checkout when the run was submitted.
    checkout_changes = Place("software/checkout.patch")
    speed_checks = Place("speed.jsonl")
    rank_times = Place("ranks.json")
    # Where the running job serves metrics, as a document of Prometheus' file_sd.
    metrics_endpoint = Place("metrics-endpoint.json")
    # What the process that exports metrics beside training could not do.
    metrics_log = Place("logs/metrics.log")
    communication = Place("communication.json")
    saves = Place("saves.jsonl")
    skips = Place("skips.json")
    stacks = Place("stacks")

    def stack_dump(self, epoch: int, rank: int) -> Path:
        return self.stacks / f"e{epoch:06d}" / f"rank-{rank:06d}.txt"

    def train_config_for(self, nodes: int) -> Path:
        """The trainer's file for a launch on fewer nodes than planned."""
        return self.directory / f"train-n{nodes:06d}.json"

    ds_config = Place("ds_config.json")

    def ds_config_for(self, nodes: int) -> Path:
        """DeepSpeed's configuration for a launch on fewer nodes than planned."""
        return self.directory / f"ds_config-n{nodes:06d}.json"

    @property
    def ds_configs(self) -> list[Path]:
        """DeepSpeed's configurations for all sizes of the run that there are."""
        return [self.ds_config, *sorted(self.directory.glob("ds_config-n*.json"))]

    traces = Place("traces")

    def trace(self, epoch: int, rank: int, first_step: int, last_step: int) -> Path:
        """A Chrome trace of torch.profiler; Nsight's have other endings."""
        name = f"e{epoch:06d}-rank-{rank:06d}-steps-{first_step}-{last_step}"
        return self.traces / f"{name}.json.gz"

    tracking_config = Place("tracking.json")
    # Files of TensorBoard and W&B, and of the process that writes them.
    tracking = Place("tracking")
    tracking_log = Place("tracking/follower.log")
    # Event files, unless the spec names a directory of its own.
    tensorboard = Place("tracking/tensorboard")
    # Finished segments of the W&B run, which `wandb sync` takes as they are.
    wandb = Place("tracking/wandb")
    # The segment that is being written.
    wandb_unfinished = Place("tracking/wandb-unfinished")
    wandb_lock = Place("tracking/wandb.lock")
    wandb_position = Place("tracking/wandb.json")
    evaluation_config = Place("evaluation.json")

    def evaluation_script(self, name: str) -> Path:
        return self.directory / f"evaluation-{name}.sbatch"

    # Append-only events: submissions, starts, ends with their numbers.
    evaluations = Place("evaluations.jsonl")
    # Held by the process that submits evaluations.
    evaluations_lock = Place("evaluations.lock")

    def evaluation_output(self, name: str, step: int, attempt: int) -> Path:
        """Where a command writes; the script of the job makes the same path."""
        return self.directory / "evaluations" / f"{name}-{step}-a{attempt}.json"

    def evaluation_log(self, name: str, step: int, attempt: int, job_id: int | str) -> Path:
        """The log of a job; `%j` as its id is Slurm's pattern for it."""
        return self.logs / f"evaluation-{name}-{step}-a{attempt}-{job_id}.out"

    epochs = Place("epochs")
    exits = Place("exits")
    notices = Place("notices")
    logs = Place("logs")

    def host_file(self, job_id: int, restart_count: int, epoch: int) -> Path:
        """The node of each task of a launch whose ranks do not follow Slurm's order of nodes."""
        return self.attempt_logs(job_id, restart_count) / f"hosts-e{epoch:06d}.txt"

    def attempt_logs(self, job_id: int, restart_count: int) -> Path:
        """Logs of the ranks of one attempt; the job script makes the directory."""
        return self.logs / f"{job_id}.{restart_count}"

    def job_log(self, job_id: int) -> Path:
        """What the batch script of all attempts of a job has printed, and slurmstepd to it."""
        return self.logs / f"slurm-{job_id}.out"

    def rank_log(self, job_id: int, restart_count: int, step_id: int, rank: int) -> Path:
        """As srun's `--output` names it in the job script: `step%s-rank%4t.log`."""
        return self.attempt_logs(job_id, restart_count) / f"step{step_id}-rank{rank:04d}.log"

    def log_archive(self, epoch: int) -> Path:
        """Logs and exit records that were old when a launch began."""
        return self.logs / f"archive-e{epoch:06d}.tar.gz"

    checkpoints = Place("checkpoints")
    # What a trainer of one's own writes, a directory for each launch.
    output = Place("output")

    def launch_output(self, epoch: int) -> Path:
        """Where the trainer of one launch writes; an older launch writes elsewhere."""
        return self.output / f"launch-{epoch:06d}"

    # A link to the directory of the newest launch.
    newest_output = Place("output/newest")
    data_cache = Place("data-cache")

    def exits_of(self, epoch: int) -> Path:
        """The directory with all exit records of a launch."""
        return self.exits / f"e{epoch:06d}"

    def exit_records(self, epoch: int, node_rank: int) -> Path:
        """The records of the ranks on one node of a launch; nodes count in Slurm's order."""
        return self.exits_of(epoch) / f"node-{node_rank:06d}.jsonl"

    def left_startup(self, epoch: int) -> Path:
        """There once a rank of a launch was stopped before its first step; it is empty."""
        return self.exits_of(epoch) / "left-startup"

    def exit_record(self, epoch: int, rank: int) -> Path:
        """The record of one rank, as hpctrain 0.1.0 wrote it; it is read and no longer written."""
        return self.exits_of(epoch) / f"rank-{rank:06d}.json"

    def require(self) -> None:
        """Raise OSError unless the run's own directory is there and can be looked into.

        A mount that is gone leaves an empty place, and whatever is made there hides the real one:
        a directory is the run's if it holds what was written into it when it was submitted.
        """
        for path in (self.supervise_config, self.train_config):
            try:
                os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            return
        raise StorageError(
            f"{self.directory} is away: it holds neither {self.supervise_config.name} nor "
            f"{self.train_config.name}"
        )

    def make_directory(self, directory: Path) -> None:
        """Make a directory below the run's, and what is missing in between.

        Raises OSError, and makes nothing, when the run's directory is away.
        """
        self.require()
        made = self.directory
        for name in directory.relative_to(self.directory).parts:
            made /= name
            make_private_directory(made)

    @property
    def fixed_directories(self) -> tuple[Path, ...]:
        """The sub-directories that a run has from the beginning."""
        return (
            self.control,
            self.epochs,
            self.exits,
            self.logs,
            self.stacks,
            self.checkpoints,
            self.kept_software,
        )

    def create(self, group: int | None = None, *, group_controls: bool = False) -> None:
        """Make the directory and its fixed sub-directories, private to the user (mode 700).

        With a `group` (an id) its members may read; all that is written later follows the mode of
        its directory (`durable.shared_mode`), and belongs to the same group. With `group_controls`
        they may also make requests, as files in `control/`. Raises OSError.
        """
        self.directory.mkdir(parents=True, mode=0o700)
        if group is not None:
            os.chown(self.directory, -1, group)
            self.directory.chmod(_GROUP_READS)
        for directory in self.fixed_directories:
            make_private_directory(directory)
        if group is not None and group_controls:
            self.control.chmod(_GROUP_WRITES)
