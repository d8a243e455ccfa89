"""Collect more evidence after a failed launch: probe its nodes, match its logs to signatures.

Belongs here: deciding whether to probe, and adding the results to the evidence. Does not belong
here: reading logs (`log_scan`), probing (`probe`), judging (`classify`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base import clock
from hpctrain.judge.documents import LaunchEvidence, LogFinding
from hpctrain.judge.probe_results import KernelLine, ProbeResult
from hpctrain.judge.signatures import Signatures
from hpctrain.records.ledger import EventKind
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.evidence.gather import has_failed, keeps_nodes
from hpctrain.supervise.evidence.log_scan import LaunchRanks, Scanner, newest_step, read_signatures
from hpctrain.supervise.evidence.probe import PreflightOptions, probe_nodes
from hpctrain.supervise.timeouts import run_with_timeout

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
    # Slurm gives each node consecutive ranks (srun(1), --distribution=block, its default).
    node_of: dict[int, str] = {}
    nodes, world_size = traces.nodes, evidence.world_size
    if nodes and world_size and world_size % len(nodes) == 0:
        per_node = world_size // len(nodes)
        node_of = {rank: nodes[rank // per_node] for rank in range(world_size)}
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
