"""Asking why a launch has failed: its logs, its nodes, their kernels.

Belongs here: when to ask, and adding the answers to the evidence. Does not belong here: reading
logs (`log_scan`), asking nodes (`probe`), judging (`classify`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.store.ledger import EventKind
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.evidence.gather import keeps_nodes, needs_a_look
from hpctrain.supervise.evidence.log_scan import Ranks, Scanner, newest_step, read_signatures
from hpctrain.supervise.evidence.probe import Question, probe_nodes
from hpctrain.supervise.judge.documents import Evidence, Finding
from hpctrain.supervise.judge.probe_answers import KernelLine, ProbeResult
from hpctrain.supervise.judge.signatures import Signatures
from hpctrain.supervise.timeouts import run_with_timeout

_LISTING_SECONDS = 5.0
Prober = Callable[[AttemptContext, Sequence[str], float], ProbeResult]


@dataclass(frozen=True)
class Postmortem:
    """Evidence with the answers in it, and what the nodes said (None: they were not asked)."""

    evidence: Evidence
    probe: ProbeResult | None = None


@dataclass(frozen=True)
class Traces:
    """Where a launch has left its traces: since when (seconds since the epoch), in steps beyond
    which, on which nodes in the order of ranks.

    `seen` are lines of kernels (with the time in them) that speak about an earlier launch: after a
    relaunch within seconds a node tells them once more.
    """

    since: float
    step_before: int = -1
    nodes: tuple[str, ...] = ()
    seen: frozenset[KernelLine] = frozenset()


def newest_logged_step(context: AttemptContext) -> int:
    """The newest step of this attempt that has logs, -1 if none or not to be seen in time."""
    steps = [-1]
    directory = _log_directory(context)
    run_with_timeout(lambda: steps.append(newest_step(directory)), _LISTING_SECONDS)
    return steps[-1]


def ask_nodes(context: AttemptContext, nodes: Sequence[str], since: float) -> ProbeResult:
    """Ask all nodes of the job by an srun of their own; see `probe.probe_nodes`."""
    return probe_nodes(
        context.slurm,
        context.job_id,
        nodes,
        Question(
            context.run_layout.directory,
            since,
            _gpus_per_node(context),
            settings=context.run_layout.supervise_config,
        ),
        interrupted=lambda: context.signals.final,
    )


def _gpus_per_node(context: AttemptContext) -> int:
    """One task per GPU; 0 (do not count them) where the size is not known."""
    shapes = context.config.shapes
    return shapes[0].tasks // shapes[0].nodes if shapes else 0


def examine(
    context: AttemptContext,
    evidence: Evidence,
    nodes: Sequence[str],
    traces: Traces,
    ask: Prober = ask_nodes,
) -> Postmortem:
    """The evidence after asking, if something has failed and the job still has its nodes.

    `nodes` are all of the job, spares too.
    """
    if not needs_a_look(evidence) or context.signals.final:
        return Postmortem(evidence)
    if not keeps_nodes(evidence):
        return Postmortem(evidence)
    probe = ask(context, nodes, traces.since)
    _note(context, probe)
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
    context: AttemptContext, evidence: Evidence, traces: Traces, probe: ProbeResult | None = None
) -> tuple[Finding, ...]:
    """What logs, exit records, srun and kernels say, as far as signatures know it.

    Never waits longer than the scanner's limits; without `signatures.json` there is nothing.
    """
    read: list[Signatures | None] = []
    run_with_timeout(
        lambda: read.append(read_signatures(context.run_layout.signatures)), _LISTING_SECONDS
    )
    if not read or read[0] is None:
        return ()
    scanner, now = Scanner(read[0]), time.time()
    ranks = _ranks(evidence, traces.nodes)
    words = [
        scanner.lines([end.message], "rank", rank=end.rank, node=end.node, at=end.ended_at)
        for end in evidence.rank_exits
    ]
    kernels = [
        scanner.lines([line.text], "kernel", node=line.node, at=line.at or now)
        for line in (probe.kernel_lines if probe is not None else ())
        if line not in traces.seen
    ]
    return (
        *(finding for found in (*words, *kernels) for finding in found),
        *scanner.lines(evidence.notices, "srun", at=now),
        *scanner.logs(_log_directory(context), traces.step_before, ranks),
    )


def _ranks(evidence: Evidence, nodes: tuple[str, ...]) -> Ranks:
    """Slurm gives each node its ranks in a row (srun(1), --distribution=block, its default)."""
    known: dict[int, str] = {}
    if nodes and evidence.world_size and evidence.world_size % len(nodes) == 0:
        each = evidence.world_size // len(nodes)
        known = {rank: nodes[rank // each] for rank in range(evidence.world_size)}
    known.update({end.rank: end.node for end in evidence.rank_exits})
    ended_at = {end.rank: end.ended_at for end in evidence.rank_exits if end.ended_at}
    return Ranks(known, ended_at)


def _log_directory(context: AttemptContext) -> Path:
    attempt = context.attempt
    return context.run_layout.attempt_logs(attempt.job_id, attempt.restart_count)


def _note(context: AttemptContext, probe: ProbeResult) -> None:
    words = probe.words()
    context.note(
        EventKind.PROBED,
        reason="; ".join(words) or f"{len(probe.asked)} nodes answer and are well",
        lost_nodes=probe.lost,
    )
    for line in words:
        say(f"probe: {line}")
