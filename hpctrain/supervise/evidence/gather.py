"""Collect the evidence about the end of a launch from the run directory, srun and Slurm.

After a failure the nodes are probed and the logs matched, too. Belongs here: collecting and
converting. Does not belong here: reading logs (`log_scan`), probing (`probe`), judging.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base import clock
from hpctrain.checkpoints.discover import good_steps, newest_listed
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import JobFacts, LaunchEvidence, LogFinding
from hpctrain.judge.external_verdict import left_unexplained
from hpctrain.judge.launch_nodes import nodes_of_ranks
from hpctrain.judge.probe_results import KernelLine, ProbeResult
from hpctrain.judge.root_causes import failures_below_agents
from hpctrain.judge.signatures import Signatures
from hpctrain.judge.slow_nodes import slow_nodes_of
from hpctrain.records.exit_records import read_agent_records, read_exit_records
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import Request, read_request
from hpctrain.records.run_records import Progress, read_record
from hpctrain.slurm.messages import StepNotice, read_end_of_job
from hpctrain.slurm.states import JobState
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.evidence.launch_watch import LaunchWatch
from hpctrain.supervise.evidence.log_scan import LaunchRanks, Scanner, newest_step, read_signatures
from hpctrain.supervise.evidence.probe import PreflightOptions, probe_nodes
from hpctrain.supervise.evidence.slurm_facts import job_facts
from hpctrain.supervise.srun_process import SrunProcess
from hpctrain.supervise.timeouts import retry_while_storage_fails, run_with_timeout

_STALLED_SECONDS = 30.0
# Of the job's log; the last lines of srun follow what slurmstepd prints when the job ends.
_LOG_TAIL_BYTES = 65536
_GOOD_OUTCOMES = frozenset({"done", "yielded"})


def gather(context: AttemptContext, launch: SrunProcess, watch: LaunchWatch) -> LaunchEvidence:
    """Collect the evidence about a launch that has ended.

    Waits for the run directory, unless the job is being ended. If it does not come back, the
    evidence has only what Slurm and srun report, and no records of ranks.
    """
    try:
        return retry_while_storage_fails(context, lambda: _gather(context, launch, watch))
    except OSError as error:
        line = f"the run directory cannot be read: {error}"
    away = LogFinding("run_directory_away", Cause.STORAGE, "root", line)
    known = _without_files(context, launch, watch, job_facts(context, patient=True))
    return replace(known, findings=(away,))


def _without_files(
    context: AttemptContext, launch: SrunProcess, watch: LaunchWatch, job: JobFacts | None
) -> LaunchEvidence:
    """Collect what the watch, srun and Slurm have reported, without the run directory."""
    return LaunchEvidence(
        superseded=watch.superseded,
        cancel_requested=_cancel_confirmed(context, job),
        signals=watch.signals,
        srun_exit_code=launch.poll(),
        task_failures=tuple(launch.failures),
        notices=launch.notices,
        job=job,
        restart_count=context.attempt.restart_count,
        stall=watch.stall,
        started=watch.started,
        step_remains=watch.step_remains,
        world_size=watch.tasks,
        nodes=watch.nodes,
        resume_step=watch.resume_step,
    )


def _gather(context: AttemptContext, launch: SrunProcess, watch: LaunchWatch) -> LaunchEvidence:
    run = context.run_layout
    run.require()
    records = read_exit_records(run, watch.epoch)
    done = run.done.exists()
    wrong = any(record.outcome == "config_error" for record in records)
    request = read_request(run)
    job = None if done or watch.superseded else job_facts(context, patient=not wrong)
    progress = read_record(run.progress, Progress)
    # What was killed after the watch began to end the step was killed by it.
    failures = [f for f in launch.failures if f.at < watch.killed_at or f.code is not None]
    if context.config.launcher != "srun":  # srun's tasks are agents, which record failed ranks
        failures = list(failures_below_agents(read_agent_records(run, watch.epoch), failures))
    known = _without_files(context, launch, watch, job)
    return replace(
        known,
        done=done,
        stop_requested_by=_requester(request, "stop", "stop-now"),
        hold_requested_by=_requester(request, "hold"),
        task_failures=tuple(failures),
        notices=(*known.notices, *_end_told_to_the_script(context, job)),
        rank_exits=tuple(sorted(records, key=lambda record: record.time)),
        started=known.started or bool(records),
        findings=_storage_findings(watch),
        last_step=progress.step if progress and progress.epoch == watch.epoch else None,
        checkpoint_step=_newest_checkpoint(context),
        stopped_in_startup=watch.stopped_in_startup,
        limit_near=watch.limit_near,
        slow_nodes=slow_nodes_of(watch.speed_check),
    )


def _newest_checkpoint(context: AttemptContext) -> int | None:
    """The step of the newest good checkpoint; while Slurm ends the job its files are not looked at.

    A cold metadata server takes a millisecond for each of thousands of files, and KillWait is 30 s.
    """
    root = context.run_layout.checkpoints
    if context.signals.final:
        return newest_listed(root)
    return next(iter(good_steps(root)), None)


def _end_told_to_the_script(
    context: AttemptContext, job: JobFacts | None
) -> tuple[StepNotice, ...]:
    """Why Slurm ends a job that has been preempted: for squeue a preemption that cancels and a
    cancel by its user within the grace are alike (COMPLETING, with a preempt time).

    slurmstepd tells them apart on the stderr of the batch script, which is the log of the job.
    """
    if job is None or not job.preempt_time or job.state is not JobState.COMPLETING:
        return ()
    attempt, path = context.attempt, context.run_layout.job_log(context.job_id)
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ()
    # The log of an earlier attempt is before the first line of this one.
    told = read_end_of_job(text.rpartition(f"attempt {attempt} of run ")[2], attempt.job_id)
    return () if told is None else (told,)


def between_launches(context: AttemptContext, signals: tuple[str, ...]) -> LaunchEvidence:
    """Collect the evidence about a signal that arrived between two launches."""
    job = job_facts(context, patient=False)
    return LaunchEvidence(
        cancel_requested=_cancel_confirmed(context, job),
        signals=signals,
        notices=_end_told_to_the_script(context, job),
        job=job,
        restart_count=context.attempt.restart_count,
        started=True,
    )


def has_failed(evidence: LaunchEvidence) -> bool:
    """True if something has failed, so that logs, kernels and nodes have to be examined."""
    if evidence.done or evidence.superseded or evidence.cancel_requested:
        return False
    if evidence.stop_requested_by or evidence.hold_requested_by or evidence.stopped_in_startup:
        return False
    clean_exits = bool(evidence.rank_exits) and all(
        rank.outcome in _GOOD_OUTCOMES for rank in evidence.rank_exits
    )
    preempted = evidence.job is not None and evidence.job.preempt_time
    return (not clean_exits and not preempted) or left_unexplained(evidence)


def keeps_nodes(evidence: LaunchEvidence) -> bool:
    """True unless Slurm ends the job; without an answer the job is assumed to keep its nodes."""
    running = evidence.job is None or evidence.job.state is JobState.RUNNING
    # A step that remains although all nodes answer: only the end of the job removes it.
    return running and not (evidence.step_remains and evidence.probed and not evidence.lost_nodes)


def _storage_findings(watch: LaunchWatch) -> tuple[LogFinding, ...]:
    """Report that the run directory did not answer the supervisor.

    Ranks that were silent or failed at that time may have waited or failed because of it.
    """
    if watch.storage_fault is not None:
        line = f"the run directory could not be read: {watch.storage_fault}"
        return (LogFinding("run_directory_away", Cause.STORAGE, "cascade", line),)
    if watch.storage_stalled_seconds < _STALLED_SECONDS:
        return ()
    line = f"the run directory did not answer for {watch.storage_stalled_seconds:.0f} s"
    return (LogFinding("run_directory_silent", Cause.STORAGE, "cascade", line),)


def _requester(request: Request | None, *kinds: str) -> str | None:
    return request.by if request is not None and request.kind in kinds else None


def _cancel_confirmed(context: AttemptContext, job: JobFacts | None) -> bool:
    """True if a cancel was requested since this attempt started and Slurm has carried it out.

    A restart of the job revokes an older cancel. While Slurm reports the job as running, the
    request has not reached it. Without an answer of Slurm only its final signal confirms.
    """
    if job is not None and job.state is JobState.RUNNING:
        return False
    if job is None and not context.signals.final:
        return False
    requested_here = False
    for event in context.ledger.events():
        if event.job_id == context.job_id:
            requested = event.event in (EventKind.CANCEL_REQUESTED, EventKind.CANCELLED)
            revoked = event.event in (EventKind.ATTEMPT_STARTED, EventKind.CANCEL_FAILED)
            requested_here = requested or (requested_here and not revoked)
    return requested_here


# -- Collect more evidence after a failed launch: probe its nodes, match its logs to signatures -


_LISTING_SECONDS = 5.0
Prober = Callable[[AttemptContext, Sequence[str], float], ProbeResult]


@dataclass(frozen=True)
class Postmortem:
    """Evidence with the results added, and the probe (None: the nodes were not probed)."""

    evidence: LaunchEvidence
    probe: ProbeResult | None = None


@dataclass(frozen=True)
class Traces:
    """Limits that separate the logs and kernel lines of one launch from those of earlier ones.

    `since`: seconds since the epoch. `step_before`: the newest step with logs before the launch.
    `nodes`: in the order of ranks. `seen`: kernel lines (with their time) that an earlier launch
    has caused; after a relaunch within seconds a node reports them again.
    """

    since: float
    step_before: int = -1
    nodes: tuple[str, ...] = ()
    seen: frozenset[KernelLine] = frozenset()


def newest_logged_step(context: AttemptContext) -> int:
    """The newest step of this attempt that has logs; -1 if none, or if reading takes too long."""
    steps = [-1]
    directory = _log_directory(context)
    run_with_timeout(lambda: steps.append(newest_step(directory)), _LISTING_SECONDS)
    return steps[-1]


def probe_job(context: AttemptContext, nodes: Sequence[str], since: float) -> ProbeResult:
    """Probe all nodes of the job; see `probe.probe_nodes`."""
    shapes = context.config.shapes
    options = PreflightOptions(
        context.run_layout.directory,
        since,
        # One task per GPU; 0 (do not count them) if the number of tasks is not known.
        shapes[0].tasks // shapes[0].nodes if shapes else 0,
        settings=context.run_layout.supervise_config,
    )
    return probe_nodes(
        context.slurm,
        context.job_id,
        nodes,
        options,
        interrupted=lambda: context.signals.final,
    )


def examine_failure(
    context: AttemptContext,
    evidence: LaunchEvidence,
    nodes: Sequence[str],
    traces: Traces,
    prober: Prober = probe_job,
) -> Postmortem:
    """Probe the nodes and read logs if something has failed and the job still has its nodes.

    `nodes` are all nodes of the job, spares included. Returns the evidence with the results.
    """
    if not has_failed(evidence) or context.signals.final:
        return Postmortem(evidence)
    if not keeps_nodes(evidence):
        return Postmortem(evidence)
    probe = prober(context, nodes, traces.since)
    reasons = probe.problem_lines()
    context.note(
        EventKind.PROBED,
        reason="; ".join(reasons) or f"{len(probe.probed)} nodes answer and have no problem",
        lost_nodes=probe.lost,
    )
    for line in reasons:
        log_message(f"probe: {line}")
    found = replace(
        evidence,
        probed=not probe.trouble,
        lost_nodes=probe.lost,
        unfit_nodes=() if probe.trouble else probe.unfit_with_reason,
        common_problems=() if probe.trouble else probe.shared_blocking,
        leaving_nodes=() if probe.trouble else probe.leaving,
        findings=(*evidence.findings, *find_lines(context, evidence, traces, probe)),
    )
    return Postmortem(found, probe)


def find_lines(
    context: AttemptContext,
    evidence: LaunchEvidence,
    traces: Traces,
    probe: ProbeResult | None = None,
) -> tuple[LogFinding, ...]:
    """Match logs, exit records, lines of srun and kernel lines against the signatures.

    Takes no longer than the scanner's limits. Empty without `signatures.json`.
    """
    read: list[Signatures | None] = []
    run_with_timeout(
        lambda: read.append(read_signatures(context.run_layout.signatures)), _LISTING_SECONDS
    )
    if not read or read[0] is None:
        return ()
    scanner, now = Scanner(read[0]), clock.now()
    node_of = nodes_of_ranks(traces.nodes, evidence.world_size)
    node_of.update({end.rank: end.node for end in evidence.rank_exits})
    ended_at = {end.rank: end.time for end in evidence.rank_exits if end.time}
    messages = [
        scanner.lines([end.words], "rank", rank=end.rank, node=end.node, at=end.time)
        for end in evidence.rank_exits
    ]
    kernels = [
        scanner.lines([line.text], "kernel", node=line.node, at=line.at or now)
        for line in (probe.kernel_lines if probe is not None else ())
        if line not in traces.seen
    ]
    return (
        *(finding for found in (*messages, *kernels) for finding in found),
        *scanner.lines(evidence.notice_lines, "srun", at=now),
        *scanner.logs(_log_directory(context), traces.step_before, LaunchRanks(node_of, ended_at)),
    )


def _log_directory(context: AttemptContext) -> Path:
    attempt = context.attempt
    return context.run_layout.attempt_logs(attempt.job_id, attempt.restart_count)
