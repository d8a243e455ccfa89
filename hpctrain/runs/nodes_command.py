"""Command `nodes`: evidence of runs against nodes, and hints for the administrators."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import ProfileName, json_option, runs_option
from hpctrain.page.output import json_out, say, table

if TYPE_CHECKING:
    from hpctrain.runs.node_evidence import NodeRow


@click.command()
@click.option("--profile", "-p", type=ProfileName(), help="Only the cluster of this profile.")
@click.option("--cluster", metavar="NAME", help="Only the cluster of this name.")
@click.option("--forgive", metavar="NODE", help="Void the evidence against a node.")
@runs_option
@json_option
def nodes(
    profile: str | None,
    cluster: str | None,
    forgive: str | None,
    runs: Path | None,
    as_json: bool,
) -> None:
    """Show the nodes with evidence against them, and hints for the administrators.

    Runs share evidence about nodes in RUNS/nodes.jsonl. A node with a score of 100 or more is
    avoided by runs with `supervise.exclude_nodes: act`. Evidence counts in full for a day, broken
    hardware for a week; later it fades. Users cannot drain nodes: the last lines are for a ticket.

    \b
    Examples:
      hpctrain nodes
      hpctrain nodes --profile a100x64 --json
      hpctrain nodes --forgive n17
    """
    from hpctrain.job.supervisor_settings import NODE_LEDGER_NAME
    from hpctrain.records.find import runs_directory
    from hpctrain.runs import node_evidence as action

    if profile and cluster:
        raise click.UsageError("--profile and --cluster exclude each other")
    ledger = runs_directory(runs) / NODE_LEDGER_NAME
    usable_nodes = 0
    if profile:
        from hpctrain.spec.loader import load_named_profile

        document = load_named_profile(profile).document
        cluster, usable_nodes = document.name, document.nodes.count
    if forgive is not None:
        entry = action.forgive(ledger, forgive, getpass.getuser(), cluster)
        say(f"Forgave node `{entry.node}` of {entry.cluster}")
        return
    rows = action.node_rows(ledger, cluster, usable_nodes)
    if as_json:
        json_out("nodes", rows)
    elif not rows:
        say("no run has evidence against a node")
    else:
        headers = ["NODE", "SCORE", "AVOIDED", "RUNS", "AGE", "EVIDENCE"]
        cells = [_cells(row) for row in rows]
        if len({row.cluster for row in rows}) > 1:
            headers.insert(0, "CLUSTER")
            cells = [[row.cluster, *line] for row, line in zip(rows, cells, strict=True)]
        table(headers, cells)
        hints = [row.admin_hint for row in rows if row.admin_hint]
        if hints:
            click.echo("\nFor the administrators (users cannot drain nodes):")
        for hint in hints:
            click.echo(f"  {hint}")


def _cells(row: NodeRow) -> list[str]:
    from hpctrain.base.units import short_duration

    avoided = "yes" if row.avoided else "spared" if row.spared else "no"
    return [
        row.node,
        f"{row.score:g}",
        avoided,
        str(len(row.runs)),
        short_duration(row.age_seconds),
        row.reason or row.kind,
    ]
