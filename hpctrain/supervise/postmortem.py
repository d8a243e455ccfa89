"""Asking why a launch has failed: its logs, its nodes, their kernels.

Belongs here: when to ask, and adding the answers to the evidence. Does not belong here: reading
logs (`scan`), asking nodes (`probe`), judging (`classify`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpctrain.store.ledger import EventKind
from hpctrain.supervise.answers import ProbeResult
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.documents import Evidence
from hpctrain.supervise.gather import keeps_nodes, needs_a_look
from hpctrain.supervise.probe import Question, probe_nodes

Prober = Callable[[AttemptContext, Sequence[str], float], ProbeResult]


@dataclass(frozen=True)
class Postmortem:
    """Evidence with the answers in it, and what the nodes said (None: they were not asked)."""

    evidence: Evidence
    probe: ProbeResult | None = None


def ask_nodes(context: AttemptContext, nodes: Sequence[str], since: float) -> ProbeResult:
    """Ask all nodes of the job by an srun of their own; see `probe.probe_nodes`."""
    return probe_nodes(
        context.slurm,
        context.job_id,
        nodes,
        Question(context.run_layout.directory, since),
        interrupted=lambda: context.signals.final,
    )


def examine(
    context: AttemptContext,
    evidence: Evidence,
    nodes: Sequence[str],
    since: float,
    ask: Prober = ask_nodes,
) -> Postmortem:
    """The evidence after asking, if something has failed and the job still has its nodes.

    `nodes` are all of the job, spares too; `since` is when the launch began (seconds since the
    epoch).
    """
    if not needs_a_look(evidence) or context.signals.final:
        return Postmortem(evidence)
    if not keeps_nodes(evidence):
        return Postmortem(evidence)
    probe = ask(context, nodes, since)
    _note(context, probe)
    found = replace(evidence, probed=not probe.trouble, lost_nodes=probe.lost)
    return Postmortem(found, probe)


def _note(context: AttemptContext, probe: ProbeResult) -> None:
    words = probe.words()
    context.note(
        EventKind.PROBED,
        reason="; ".join(words) or f"{len(probe.asked)} nodes answer and are well",
        lost_nodes=probe.lost,
    )
    for line in words:
        say(f"probe: {line}")
