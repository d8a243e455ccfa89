"""Writes a run for hosts without a scheduler: hostfile, script of a node, command lines.

Belongs here: DeepSpeed's and Open MPI's form of a hostfile, and the words that start a node on each
host. Does not belong here: reaching the hosts.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.base.errors import UsageError
from hpctrain.base.printable_text import printable_line
from hpctrain.export.exported_run import Export, ExportedFile, exported_run
from hpctrain.export.lost_settings import LostSetting
from hpctrain.job.prepare import Prepared
from hpctrain.job.render.quoting import sh, sh_expanded
from hpctrain.slurm.parse import expand_hosts

HOSTFILE, NODE_SCRIPT, COMMANDS = "hostfile", "run-node.sh", "commands.txt"
_PORT = 29500
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
# The same as `name` of a spec.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def export_hosts(
    prepared: Prepared, hosts: str | None, directory: Path, runs: Path, name: str | None = None
) -> Export:
    """Write a run for hosts; the files are to be in `directory`, the run in RUNS/NAME.

    `hosts` names one host per node of the plan, in the order of the nodes. Raises UsageError for
    another number of hosts, and for names that are none.
    """
    if hosts is None:
        raise UsageError(
            f"the plan has {prepared.plan.nodes}: which hosts are these?",
            hint="--hosts node[1-4], the nearest neighbours beside each other",
        )
    try:
        names = expand_hosts(hosts)
    except ValueError as error:
        raise UsageError(f"--hosts: {error}") from error
    run_name = name or prepared.spec.document.name
    if not _NAME.fullmatch(run_name):
        raise UsageError(f"--name: `{run_name}` is no name of a run")
    run = exported_run(prepared, "hosts")
    if len(names) != run.nodes:
        raise UsageError(
            f"--hosts names {len(names)} hosts, and the plan has {run.nodes} nodes",
            hint="name one host per node, in the order in which neighbours are nearest",
        )
    odd = [host for host in names if not _HOST.fullmatch(host)]
    if odd:  # ssh would read a dash as an option
        raise UsageError(f"--hosts: `{odd[0]}` is no name of a host")
    twice = {host for host in names if names.count(host) > 1}
    if twice:
        raise UsageError(f"--hosts names {', '.join(sorted(twice))} twice")
    lost = run.lost
    if run.inputs:
        reason = f"every host needs them at these paths: {', '.join(run.inputs)}"
        lost = (*lost, LostSetting("files", reason))
    place = str(directory.absolute()).rstrip("/")

    how_to = (
        f"Starts the ranks of one node:  sh {NODE_SCRIPT} RANK",
        f"RANK is the line of this host in {HOSTFILE}, from 0; below mpirun it is known.",
        f"{COMMANDS} starts all. To stop, send SIGTERM to this process on every host: ranks save.",
        "MASTER_PORT, the same on every host, replaces the port.",
    )
    lines = ["#!/bin/sh", *run.comment(lost, how_to).splitlines(), "set -eu"]
    lines.append("rank=${1:-${OMPI_COMM_WORLD_RANK:?is not set: give the rank of this host}}")
    for own_name in run.own_names:
        lines.append(f': "${{{own_name}:?is not set on this host, and the spec inherits it}}"')
    for one in run.variables:
        rest = f'${{{one.name}:+":${one.name}"}}' if one.prepend else ""
        lines.append(f"export {one.name}={sh_expanded(one.value)}{rest}")
    python = prepared.profile.document.software.interpreter(prepared.facts.python)
    program = run.program(str(runs.absolute() / run_name), f"{place}/train.json")
    *words, train_config = [sh_expanded(python), *map(sh, program)]
    words += [
        '--node-rank="$rank"',
        f"--master-addr={sh(names[0])}",
        f'--master-port="${{MASTER_PORT:-{_PORT}}}"',
        train_config,
    ]
    node_script = "\n".join([*lines, "exec " + " \\\n  ".join(words), ""])

    script = sh(f"{place}/{NODE_SCRIPT}")
    commands = [
        f"# {printable_line(run.title)}",
        "# Either one line per host, all at the same time, from anywhere:",
        *(f"ssh {sh(host)} {sh(f'sh {script} {rank}')} &" for rank, host in enumerate(names)),
        "wait",
        "# or all by Open MPI, one process per host:",
        f"#   mpirun --hostfile {sh(f'{place}/{HOSTFILE}')} -np {run.nodes} "
        f"--map-by ppr:1:node sh {script}",
        "# Start them again after a failure: the run goes on from its newest verified checkpoint.",
        "",
    ]
    hostfile = "".join(f"{host} slots={run.ranks_per_node}\n" for host in names)
    return Export(
        (
            ExportedFile("train.json", run.train_json),
            ExportedFile(HOSTFILE, hostfile),
            ExportedFile(NODE_SCRIPT, node_script),
            ExportedFile(COMMANDS, "\n".join(commands)),
        ),
        lost,
    )
