"""Shows the evidence of runs against nodes: scores, avoided nodes, and a command for admins.

Belongs here: reading the node ledger for a person, and forgiving a node in a person's name. Does
not belong here: weighing (`hpctrain.judge.blame`), and collecting evidence
(`hpctrain.supervise`).
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import InvalidInputError, Problem, UsageError
from hpctrain.judge.blame import NodeScore, nodes_to_avoid, scores, story
from hpctrain.records.node_record import NodeEvidence, NodeLedger, forgiveness

# Everything but characters that are harmless inside double quotes of a shell: the reason comes
# from logs, and an administrator pastes it as root.
_UNSAFE = re.compile(r"[^A-Za-z0-9 .,:;_/()+@-]")
_LONGEST_REASON = 160


class NodeRow(BaseModel):
    """One node with evidence against it.

    `kind` and `reason` are of the heaviest evidence, `last_time` of the newest (seconds since the
    epoch). `avoided`: runs that may exclude nodes do so; `spared`: bad enough, but too many are.
    `admin_hint`: only where machines alone can be the reason, or several programs have met it.
    """

    model_config = ConfigDict(frozen=True)

    cluster: str
    node: str
    score: float
    kind: str
    reason: str
    last_time: float
    age_seconds: float
    avoided: bool
    spared: bool
    runs: tuple[str, ...]
    gpus: tuple[str, ...]
    admin_hint: str | None = None


def node_rows(
    ledger: Path, cluster: str | None = None, usable_nodes: int = 0, now: float | None = None
) -> tuple[NodeRow, ...]:
    """List nodes with evidence against them, the worst of each cluster first.

    `usable_nodes`: nodes of the cluster (0: unknown). `now` is seconds since the epoch. Raises
    InvalidInputError when the ledger cannot be read.
    """
    try:
        evidence = NodeLedger(ledger).read()
    except OSError as error:
        raise InvalidInputError([_problem(ledger, "read", error)]) from error
    at = clock.now() if now is None else now
    clusters = dict.fromkeys(one.cluster for one in evidence if cluster in (None, one.cluster))
    rows = []
    for name in clusters:
        avoid = nodes_to_avoid(evidence, name, at, usable_nodes=usable_nodes, needed_nodes=0)
        for one in scores(evidence, name, at):
            last_time = max(seen.time for seen in one.evidence)
            rows.append(
                NodeRow(
                    cluster=name,
                    node=one.node,
                    score=round(one.score, 1),
                    kind=one.heaviest.kind,
                    reason=one.heaviest.reason,
                    last_time=last_time,
                    age_seconds=max(0.0, at - last_time),
                    avoided=one.node in avoid.nodes,
                    spared=one.node in avoid.dropped,
                    runs=tuple(dict.fromkeys(seen.run_id for seen in one.evidence)),
                    gpus=tuple(dict.fromkeys(seen.gpu for seen in one.evidence if seen.gpu)),
                    admin_hint=drain_command(one) if one.is_bad and one.is_proven else None,
                )
            )
    return tuple(rows)


def forgive(ledger: Path, node: str, user: str, cluster: str | None = None) -> NodeEvidence:
    """Void the evidence against a node, in the name of `user`; the entry stays in the ledger.

    Raises UsageError when there is nothing against the node, or on several clusters something.
    """
    clusters = [row.cluster for row in node_rows(ledger, cluster) if row.node == node]
    if not clusters:
        where = f" of {cluster}" if cluster else ""
        raise UsageError(
            f"there is nothing against node `{node}`{where} in {ledger}",
            hint="`hpctrain nodes` lists the nodes with evidence against them",
        )
    if len(clusters) > 1:
        names = " and ".join(clusters)
        raise UsageError(f"`{node}` is a node of {names}", hint="choose one with `--cluster`")
    entry = forgiveness(clock.now(), clusters[0], node, user, f"forgiven by {user}")
    try:
        NodeLedger(ledger).append([entry])
    except OSError as error:
        raise InvalidInputError([_problem(ledger, "written", error)]) from error
    return entry


def _problem(ledger: Path, what: str, error: OSError) -> Problem:
    return Problem(f"cannot be {what}: {error.strerror}", str(ledger))


def drain_command(one: NodeScore) -> str:
    """Write the command with which an administrator drains a node (scontrol(1), State=DRAIN)."""
    day = time.strftime("%Y-%m-%d", time.gmtime(one.heaviest.time))
    reason = _UNSAFE.sub("?", story(one).rpartition(", score ")[0])[:_LONGEST_REASON]
    return f'scontrol update NodeName={one.node} State=DRAIN Reason="hpctrain: {reason}, {day}"'
