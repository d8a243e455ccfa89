"""Be rank 0: pace the steps, write the records of the launch, publish checkpoints, end the launch.

All that others read is written by the code of the trainer itself: `report`, `entry`,
`saving.save_interval`, `hpctrain.checkpoints.publish`. Does not belong here: messages (`rank`),
what happens on a node (`node`).
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.publish import Retention, publish
from hpctrain.records.kept_code import own_code
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import (
    checkpoint_name,
    digest_file,
    partial_name,
    read_manifest,
    read_rank_digests,
    read_writers,
    remove_rank_digests,
    step_of,
    what_is_wrong,
)
from hpctrain.records.requests import SaveRequest, is_requested
from hpctrain.records.run_records import (
    DoneMarker,
    Outcome,
    RankTimes,
    TrainerExit,
    read_record,
    read_saves,
)
from hpctrain.records.software import SoftwareFacts, SoftwareRecord, write_software
from hpctrain.train.entry import Ending, mark_done
from hpctrain.train.faults import BadCheckpointError
from hpctrain.train.job import Job, read_config
from hpctrain.train.rank_environment import read_launch
from hpctrain.train.report import Reporter, StepResult
from hpctrain.train.saving.publication import save_record, steps_to_evaluate
from hpctrain.train.saving.save_interval import SaveInterval
from hpctrain.train.stacks import open_stack_dump
from hpctrain.train.stop import StopSignals
from hpctrain.train.storage import fence_of, outlast
from hpctrain.version import __version__
from tests.rig.stand_in.node import Tree, accept
from tests.rig.stand_in.rank import (
    BY_SUPERVISOR,
    PEER_GONE,
    RESTORE,
    SAVE,
    STEPS,
    TRAIN,
    Link,
    loss_of,
)

# -- Record that a rank of the stand-in failed, by the trainer's own code ------------------------
# Imported only when something failed: most ranks never pay for it.


def record_failure(train_json: str, error: Exception) -> int:
    """Record the failure of this process; returns its exit code."""
    launch = read_launch(os.environ)
    return record_failures(RunLayout(Path(train_json).absolute().parent), {launch.rank: error})


def record_failures(
    run: RunLayout,
    errors: Mapping[int, Exception],
    *,
    begun: bool = False,
    loading_step: int | None = None,
) -> int:
    """Record how ranks of this node have failed; returns the exit code of the first.

    `begun`: the launch has trained, so a lost connection is not the end of a stopped start.
    `loading_step`: they were loading the checkpoint of this step.
    """
    launch = read_launch(os.environ)
    codes = []
    for rank, error in errors.items():
        ending = Ending(run, replace(launch, rank=rank), StopSignals())
        ending.loading_step = loading_step
        if begun:
            ending.begin()
        codes.append(ending.of(partial(_raise, error)))
    return codes[0]


def _raise(error: Exception) -> NoReturn:
    raise error


# Ranks agree this often, so that hundreds of them cost little: on several steps if steps are short.
_ROUND_SECONDS = 1.0
_LEADER_FILE = "common.pt"
_MOST_SIGNALLED = 64
# No passes are measured: this share of a step counts as computing, on all ranks alike.
_COMPUTE_SHARE = 0.8


def lead(tree: Tree, path: Path, local: socket.socket, others: int, step_seconds: float) -> int:
    """Run rank 0 from the first check to the exit code."""
    master = socket.create_server(("", int(os.environ["MASTER_PORT"])), backlog=socket.SOMAXCONN)
    stop = StopSignals()
    stop.install()
    for number in tree.stop:
        stop.remember(number)
    if read_record(tree.run.done, DoneMarker) is not None:
        tree.welcome(local, others, dumps=False)
        tree.leave(TrainerExit.DONE)
        return TrainerExit.DONE
    dump = open_stack_dump(tree.run, tree.launch)
    ending = Ending(tree.run, tree.launch, stop)

    def train() -> Outcome:
        ending.starting()
        tree.welcome(local, others)
        _await_nodes(tree, master)
        job = Job(read_config(path), tree.launch, tree.run, stop)
        outlast(job.run, fence_of(job.run, job.launch).check)
        return Leader(tree, job, ending, step_seconds).run()

    code = ending.of(train)
    if code == TrainerExit.CRASH and tree.local_links:
        record_failures(
            tree.run,
            dict.fromkeys(tree.local_links, ConnectionError(PEER_GONE)),
            begun=tree.begun,
        )
    if code == TrainerExit.CRASH:
        tree.fail_locals(code)
    else:
        tree.leave(code)
        dump.discard_if_unused()
    return code


def _await_nodes(tree: Tree, master: socket.socket) -> None:
    """Wait for the first ranks of all other nodes, and put them in the order of their ranks."""
    others = int(os.environ["SLURM_STEP_NUM_NODES"]) - 1
    come: dict[int, tuple[str, Link]] = {}
    while len(come) < others:
        link = accept(master, [])  # a stop ends this process: see `Ending.starting`
        rank, node = link.receive()[1].decode().split(" ", 1)
        come[int(rank)] = node, link
    tree.node_names = [come[rank][0] for rank in sorted(come)]
    tree.nodes = [come[rank][1] for rank in sorted(come)]


class Leader:
    """Trains and saves until the target or a request to stop; see `hpctrain.train.loop`."""

    def __init__(self, tree: Tree, job: Job, ending: Ending, step_seconds: float) -> None:
        self._tree, self._job, self._ending = tree, job, ending
        self._step_seconds = step_seconds
        self._reporter = Reporter(job)
        self._interval = SaveInterval(job.config, job.launch.mttf_seconds, read_saves(job.run))
        self._request = SaveRequest(job.run, looks=True)
        self._retention = Retention(job.run.checkpoints)
        self._step = self._consumed_samples = 0
        self._newest_saved: int | None = None
        ending.step = lambda: self._step

    def run(self) -> Outcome:
        """Return how the launch ended: `done` or `yielded`."""
        self._reporter.phase("starting")
        self._record_software()
        self._restore()
        self._reporter.phase("training", self._step)
        self._interval.begun()
        self._ending.begin()
        first, target = self._step, self._job.config.train_steps
        stopping = self._asked_to_stop()
        while self._step < target and not stopping:
            signalled = self._round()
            stopping = bool(signalled) or self._asked_to_stop()
            outside = [rank for rank in signalled if not rank & BY_SUPERVISOR]
            self._ending.signalled_ranks = tuple(outside[:_MOST_SIGNALLED])
            due = self._step % (self._job.config.save_interval_steps or target) == 0
            due = due or self._request.made or self._interval.overdue
            if due and not stopping and self._step < target:
                self._save()
        if self._step > first and self._newest_saved != self._step:
            self._save()
        self._request.done()
        self._reporter.phase("leaving")
        self._reporter.close()
        if self._step < target:
            return "yielded"
        outlast(self._job.run, lambda: mark_done(self._job, self._step))
        return "done"

    def _asked_to_stop(self) -> bool:
        return self._job.stop.requested or is_requested(self._job.run, "stop")

    def _record_software(self) -> None:
        """Record what the first rank of every node has: all of them have the same."""
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        facts = SoftwareFacts(
            hpctrain=__version__,
            code=own_code(),
            python=platform.python_version(),
            torch="none",
            open_files=open_files,
            remarks=("this trainer computes nothing",),
        )
        launch = self._job.launch
        nodes = (launch.node, *sorted(self._tree.node_names))
        record = SoftwareRecord(
            epoch=launch.epoch, nodes=nodes, ranks=launch.world_size, facts=facts
        )
        outlast(self._job.run, lambda: write_software(self._job.run, [record]))

    def _restore(self) -> None:
        directory = self._job.resume_directory
        if directory is None:
            self._reporter.log("start", step=0, world_size=self._job.launch.world_size)
            return
        self._reporter.phase("loading")
        self._ending.loading_step = step_of(directory.name)
        manifest = read_manifest(directory)
        problem = what_is_wrong(directory, manifest, deep=False)
        if problem is not None or manifest is None:
            raise BadCheckpointError(f"cannot resume from {directory.name}: {problem}")
        self._tree.everyone(RESTORE, str(directory).encode())
        self._step, self._consumed_samples = manifest.step, manifest.consumed_samples or 0
        self._newest_saved = manifest.step
        self._ending.loading_step = None
        self._reporter.resumed_from(self._step)
        self._reporter.log("resume", step=self._step, checkpoint=directory.name)

    def _round(self) -> list[int]:
        """Train some steps on all ranks; returns the ranks that have got a signal."""
        config = self._job.config
        every = config.save_interval_steps or config.train_steps
        ends = (config.train_steps, (self._step // every + 1) * every)
        count = max(1, round(_ROUND_SECONDS / self._step_seconds))
        count = min(count, *(end - self._step for end in ends))
        began_at, first = time.monotonic(), self._step + 1
        sums, signalled = self._tree.everyone(TRAIN, STEPS.pack(first, count))
        if self._job.stop.name not in (None, "SIGUSR2"):
            signalled = [self._job.launch.rank, *signalled]
        time.sleep(max(0.0, count * self._step_seconds - (time.monotonic() - began_at)))
        step_seconds = (time.monotonic() - began_at) / count
        memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for step, total in enumerate(sums, first):
            self._step = step
            self._consumed_samples += config.batch_sizes.size_after(self._step - 1)
            result = StepResult(
                step=step,
                consumed_samples=self._consumed_samples,
                loss=loss_of(step, total),
                grad_norm=1.0,
                learning_rate=config.lr,
                step_seconds=step_seconds,
                memory_bytes=memory_bytes,
            )
            self._reporter.finished_step(result, None)
        window = config.rank_times_interval_steps
        if (first - 1) // window < self._step // window:
            self._report_times(first, step_seconds)
        return signalled

    def _report_times(self, first: int, step_seconds: float) -> None:
        launch = self._job.launch
        world_size = launch.world_size
        names = [launch.node, *self._tree.node_names]
        per_node = world_size // len(names)
        self._reporter.rank_times(
            RankTimes(
                epoch=launch.epoch,
                first_step=first,
                last_step=self._step,
                time=time.time(),
                compute_seconds=(step_seconds * _COMPUTE_SHARE,) * world_size,
                nodes=tuple(name for name in names for _ in range(per_node)),
            )
        )

    def _save(self) -> None:
        """Save the present step on all ranks, and publish it; training waits."""
        job, step = self._job, self._step
        root = job.run.checkpoints
        began_at = time.monotonic()
        self._reporter.phase("saving")
        directory = root / partial_name(step, job.launch.epoch)
        shutil.rmtree(directory, ignore_errors=True)
        job.run.make_directory(directory)
        self._interval.begun()
        self._request.done()
        self._tree.everyone(SAVE, str(directory).encode())
        (directory / _LEADER_FILE).write_text(f"{step} {self._consumed_samples}\n")
        shards, writers = read_rank_digests(directory), read_writers(directory)
        world_size = job.launch.world_size
        if len(shards) != world_size:
            raise CheckpointError(f"{len(shards)} of {world_size} ranks have left digests")
        files = {digest_file(directory, _LEADER_FILE): 0}
        files |= {file: writers[file.name] for file in shards}
        manifest = job.manifest(step, self._consumed_samples, files)
        stall_seconds = time.monotonic() - began_at
        outlast(job.run, lambda: publish(root, manifest, fence_of(job.run, job.launch)))
        self._newest_saved = step
        record = save_record(manifest, stall_seconds, time.monotonic() - began_at)
        self._interval.published(record)
        self._reporter.published(record)
        config, pinned = job.config, job.launch.pinned_steps | steps_to_evaluate(job.run)
        remove_rank_digests(root / checkpoint_name(step))
        self._retention.retire(config.keep_checkpoints, config.keep_every_steps, pinned)
        self._reporter.phase("training")
