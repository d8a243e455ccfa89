"""Writes the files for hosts without a scheduler: hostfile, script of a node, command lines. Pure.

Belongs here: DeepSpeed's and Open MPI's form of a hostfile, and the words that start a node on each
host. Does not belong here: reaching the hosts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpctrain.base.errors import UsageError
from hpctrain.base.printable_text import printable_line
from hpctrain.export.exported_run import ExportedFile, ExportedRun
from hpctrain.export.file_head import file_head
from hpctrain.export.lost_settings import LostSetting
from hpctrain.job.render.quoting import sh, sh_expanded

HOSTFILE, NODE_SCRIPT, COMMANDS = "hostfile", "run-node.sh", "commands.txt"
_PORT = 29500
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")


@dataclass(frozen=True)
class HostSettings:
    """The hosts in the order of the nodes, and paths that all of them have.

    `directory` holds the files, `run_directory` the run.
    """

    hosts: tuple[str, ...]
    directory: str
    run_directory: str
    python: str


def host_files(run: ExportedRun, settings: HostSettings) -> tuple[ExportedFile, ...]:
    """Write all files. Raises UsageError unless there is one host for each node of the plan."""
    if len(settings.hosts) != run.nodes:
        raise UsageError(
            f"--hosts names {len(settings.hosts)} hosts, and the plan has {run.nodes} nodes",
            hint="name one host per node, in the order in which neighbours are nearest",
        )
    odd = [host for host in settings.hosts if not _HOST.fullmatch(host)]
    if odd:  # ssh would read a dash as an option
        raise UsageError(f"--hosts: `{odd[0]}` is no name of a host")
    twice = {host for host in settings.hosts if settings.hosts.count(host) > 1}
    if twice:
        raise UsageError(f"--hosts names {', '.join(sorted(twice))} twice")
    return (
        ExportedFile("train.json", run.train_json),
        ExportedFile(HOSTFILE, _hostfile(run, settings)),
        ExportedFile(NODE_SCRIPT, _node_script(run, settings)),
        ExportedFile(COMMANDS, _commands(run, settings)),
    )


def missing_on_hosts(run: ExportedRun) -> tuple[LostSetting, ...]:
    """List what the hosts have to have at its place."""
    if not run.inputs:
        return ()
    reason = f"every host needs them at these paths: {', '.join(run.inputs)}"
    return (LostSetting("files", reason),)


def _hostfile(run: ExportedRun, settings: HostSettings) -> str:
    # DeepSpeed's and Open MPI's form
    return "".join(f"{host} slots={run.ranks_per_node}\n" for host in settings.hosts)


def _node_script(run: ExportedRun, settings: HostSettings) -> str:
    how_to = (
        f"Starts the ranks of one node:  sh {NODE_SCRIPT} RANK",
        f"RANK is the line of this host in {HOSTFILE}, from 0; below mpirun it is known.",
        f"{COMMANDS} starts all. To stop, send SIGTERM to this process on every host: ranks save.",
        "MASTER_PORT, the same on every host, replaces the port.",
    )
    lost = (*run.lost, *missing_on_hosts(run))
    lines = ["#!/bin/sh", *file_head(run, lost, how_to).splitlines(), "set -eu"]
    lines.append("rank=${1:-${OMPI_COMM_WORLD_RANK:?is not set: give the rank of this host}}")
    for name in run.own_names:
        lines.append(f': "${{{name}:?is not set on this host, and the spec inherits it}}"')
    for one in run.variables:
        rest = f'${{{one.name}:+":${one.name}"}}' if one.prepend else ""
        lines.append(f"export {one.name}={sh_expanded(one.value)}{rest}")
    words = [sh(settings.python), *_program(run, settings)]
    words[-1:] = [
        '--node-rank="$rank"',
        f"--master-addr={sh(settings.hosts[0])}",
        f'--master-port="${{MASTER_PORT:-{_PORT}}}"',
        words[-1],
    ]
    return "\n".join([*lines, "exec " + " \\\n  ".join(words), ""])


def _program(run: ExportedRun, settings: HostSettings) -> list[str]:
    directory = settings.directory.rstrip("/")
    return [sh(word) for word in run.program(settings.run_directory, f"{directory}/train.json")]


def _commands(run: ExportedRun, settings: HostSettings) -> str:
    directory = settings.directory.rstrip("/")
    script = sh(f"{directory}/{NODE_SCRIPT}")
    lines = [
        f"# {printable_line(run.title)}",
        "# Either one line per host, all at the same time, from anywhere:",
    ]
    for rank, host in enumerate(settings.hosts):
        lines.append(f"ssh {sh(host)} {sh(f'sh {script} {rank}')} &")
    lines += [
        "wait",
        "# or all by Open MPI, one process per host:",
        f"#   mpirun --hostfile {sh(f'{directory}/{HOSTFILE}')} -np {run.nodes} "
        f"--map-by ppr:1:node sh {script}",
        "# Start them again after a failure: the run goes on from its newest verified checkpoint.",
    ]
    return "\n".join([*lines, ""])
