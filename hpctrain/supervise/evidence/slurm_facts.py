"""Query Slurm about the supervisor's own job, its nodes and its steps, and signal these steps.

Belongs here: queries with their retries. Does not belong here: judging (`external_verdict`), the
srun process itself (`srun_process`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.judge.documents import JobFacts
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import Progress, read_record
from hpctrain.slurm.client import Backoff
from hpctrain.slurm.parse import has_leaves
from hpctrain.slurm.process import for_queries
from hpctrain.slurm.states import JobState
from hpctrain.supervise.context import AttemptContext, is_of_attempt, log_message
from hpctrain.supervise.evidence.log_scan import newest_step
from hpctrain.supervise.evidence.probe import COMMANDS_STEP_NAME, STEP_NAME
from hpctrain.supervise.timeouts import run_with_timeout

# A controller that restarts is away for seconds to minutes; the job loses nothing by waiting,
# because without an answer it could not requeue either.
_PATIENCE_SECONDS = 600.0


def job_facts(context: AttemptContext, *, patient: bool) -> JobFacts | None:
    """Return Slurm's record of this job; None when it does not answer.

    `patient`: retry for minutes, because only the controller can tell a preemption, a cancel or a
    lost node from a crash.
    """
    deadline = clock.monotonic() + (_PATIENCE_SECONDS if patient else 0.0)
    pauses = Backoff()
    while True:
        try:
            record = context.slurm.show_job(context.job_id)
        except SlurmError:
            record = None
        if record is not None:
            return JobFacts(
                state=JobState.RUNNING if record.state.is_running else record.state,
                reason=record.reason or "None",
                restart_count=record.restart_count or 0,
                preempt_time=record.preempt_time is not None,
            )
        if clock.monotonic() >= deadline or context.signals.final:
            return None
        clock.sleep(pauses.next_seconds())


def still_ours(context: AttemptContext, facts: JobFacts | None) -> bool:
    """True if Slurm runs this attempt and is not ending it, so it did not send a final signal."""
    return (
        facts is not None
        and facts.state is JobState.RUNNING
        and facts.restart_count == context.attempt.restart_count
        and not facts.preempt_time
    )


# -- Find the nodes that an attempt has lost, when its supervisor recorded no end ---------------


# Shutdown, firmware and boot of a node with eight GPUs take a quarter of an hour. What goes down or
# boots later than this after an attempt's last record has nothing to do with it.
REBOOT_SECONDS = 3600.0


def gone_nodes(
    context: AttemptContext, lost: Event, events: Sequence[Event] = ()
) -> tuple[str, ...]:
    """The nodes of the attempt begun by `lost` that are down or have booted since its last record.

    Empty if Slurm does not answer. If Slurm reports all nodes as down, our own included, the
    controller has just started, and none counts.
    """
    if not lost.nodes:
        return ()
    progress = read_record(context.run_layout.progress, Progress)
    since = max(
        lost.time,
        progress.time if progress is not None else lost.time,
        *(event.time for event in events if is_of_attempt(event, lost)),
    )
    slurm = context.slurm
    try:
        nodes = slurm.hostnames(lost.nodes)
        states = slurm.node_states({*nodes, *slurm.hostnames(context.attempt.nodes)})
        booted = slurm.boot_times(nodes)
    except SlurmError:
        return ()
    down = {node for node, one in states.items() if one.is_down or not one.responding}
    if len(down) == len(states) or clock.now() > since + REBOOT_SECONDS:
        down = set()
    back = {node for node, at in booted.items() if since <= at <= since + REBOOT_SECONDS}
    return tuple(node for node in nodes if node in down | back)


# -- Find the leaf switch or block of each node of the job --------------------------------------


_PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"


def leaves_of(
    context: AttemptContext, nodes: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Query where the nodes of the job are; empty if nothing depends on it, or Slurm cannot tell.

    Slurm sets the pattern of the batch node's address (sbatch(1)): without a switch or a block in
    it the controller is not asked.
    """
    if context.config.topology is None or len(nodes) < 2:
        return {}
    plugin = context.config.topology.plugin
    pattern = environment.get(_PATTERN)
    if pattern is not None and not has_leaves(pattern):
        log_message(f"Slurm has no topology/{plugin} in force: where nodes are is not known")
        return {}
    try:
        known = context.slurm.leaves()
    except SlurmError as error:
        log_message(f"where nodes are is not known: {error}")
        return {}
    return {node: known[node] for node in nodes if node in known}


# -- List, signal and kill the srun steps of this attempt. If Slurm does not answer, do nothing -


class OwnSteps:
    """The numbered steps of the running attempt; queries Slurm on each call."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context

    def ids(self) -> list[str]:
        """List the live srun steps of this attempt (not `batch` and `extern`).

        Step ids start again at 0 when Slurm restarts the job (slurmctld/job_mgr.c,
        batch_requeue_fini), so a supervisor that outlived its attempt must not touch them.
        """
        slurm, attempt = self._context.slurm, self._context.attempt
        try:
            job = slurm.jobs([attempt.job_id]).get(attempt.job_id)
            if job is None or job.restart_count != attempt.restart_count:
                return []
            steps = slurm.steps(attempt.job_id)
        except SlurmError:
            return []
        return [
            step.step_id
            for step in steps
            # The probe's step on a node that did not answer stays until Slurm gives the node up.
            if step.step_id.isdigit() and step.name not in (STEP_NAME, COMMANDS_STEP_NAME)
        ]

    def signal(self, name: str) -> None:
        """Send a signal such as `USR2` to all tasks."""
        for step_id in self.ids():
            with contextlib.suppress(SlurmError):
                self._context.slurm.signal_step(self._context.job_id, step_id, name)

    def kill(self) -> bool:
        """Kill all tasks; False if no step is left, or Slurm does not answer."""
        step_ids = self.ids()
        for step_id in step_ids:
            with contextlib.suppress(SlurmError):
                self._context.slurm.kill_step(self._context.job_id, step_id)
        return bool(step_ids)


# -- Keep the step ids of this attempt apart from those of lost attempts of the same job --------
# Slurm numbers the steps of a job from 0 again when it restarts the job (slurmctld/job_mgr.c,
# batch_requeue_fini). A batch node that froze and thaws after its job was restarted elsewhere
# brings back an srun and slurmstepds of the lost attempt. They end their step by its id, and
# slurmctld applies that to the step of the present attempt with the same id: its ranks are killed.
# (Observed on 22.05.8, whenever srun runs before the slurmstepd of the batch step kills it.) The
# supervisor cannot prevent this, but it can use up the ids of the lost attempt with steps that end
# at once. slurmctld then answers that there is no such step.


_LISTING_SECONDS = 5.0
_SECONDS_EACH, _SECONDS = 20.0, 60.0
_COMMAND = ("/bin/sh", "-c", "echo $SLURM_STEP_ID")


def use_up_step_ids(
    context: AttemptContext, environment: Mapping[str, str], srun: Sequence[str] = ("srun",)
) -> None:
    """Run empty steps until no id is left that an srun of a lost attempt could end.

    An attempt without lost predecessors in the same job, which is nearly every one, runs none.
    Gives up after a minute, or when Slurm does not start a step: then a node that thaws can cost
    one launch. Tests replace `srun`.
    """
    job_id = context.job_id
    logs = [
        context.run_layout.attempt_logs(job_id, event.restart_count or 0)
        for event in context.ledger.events()
        if event.event is EventKind.ATTEMPT_LOST and event.job_id == job_id
    ]
    found: list[int] = []
    run_with_timeout(lambda: found.extend(map(newest_step, logs)), _LISTING_SECONDS)
    newest = max(found, default=-1)
    # Steps of ranks leave logs; one more for the probe of nodes that may have followed.
    last = newest + 1 if newest >= 0 else -1
    deadline = clock.monotonic() + _SECONDS
    while last >= 0 and not context.signals.final:
        used = _empty_step(context, environment, srun) if clock.monotonic() < deadline else None
        if used is None:
            log_message(f"step ids up to {last} of lost attempts could not be used up")
            return
        if used >= last:
            return


def _empty_step(
    context: AttemptContext, environment: Mapping[str, str], srun: Sequence[str]
) -> int | None:
    """Run an empty step beside all others; return its id, None if it did not run."""
    argv = [
        *srun,
        *(f"--jobid={context.job_id}", f"--job-name={STEP_NAME}", "--overlap"),
        *("--nodes=1", "--ntasks=1", f"--nodelist={context.attempt.node}"),
        *("--mpi=none", "--input=none", "--export=ALL", "--chdir=/", "--cpu-bind=none"),
        *_COMMAND,
    ]
    try:
        done = subprocess.run(
            argv,
            env=for_queries(environment or os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS_EACH,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return int(text) if text.isdecimal() else None
