"""Change the configuration of a running sandbox.

Belongs here: single keys of slurm.conf that Slurm accepts while jobs run. Does not belong here: the
whole file (see `config`), which the next start rewrites.
"""

from __future__ import annotations

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.sandbox.processes import (
    Process,
    all_processes,
    await_condition,
    find_process,
    is_alive,
    read_command_line,
)
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.state import DaemonRecord
from hpctrain.slurm.capabilities import capabilities_of_release

_REPLACED_TIMEOUT_SECONDS = 120.0


def set_option(sandbox: Sandbox, key: str, value: str | None) -> None:
    """Set or remove `key` in slurm.conf, and make all daemons read the file again.

    Raises SlurmError when slurmctld refuses it, SlurmUnreachableError when a daemon does not come
    back.
    """
    conf = sandbox.paths.slurm_conf
    lines = [line for line in conf.read_text().splitlines() if not line.startswith(f"{key}=")]
    if value is not None:
        lines.append(f"{key}={value}")
    conf.write_text("\n".join(lines) + "\n")
    running = []  # daemons of Slurm that are neither dead nor frozen
    for record in sandbox.state.daemons:
        process = find_process(record.identity.pid)
        if process is None or process.identity != record.identity or process.state == "T":
            continue
        if record.name.startswith(("slurmctld", "slurmd-")):
            running.append((record, read_command_line(process.pid)))
    sandbox.command("scontrol", "reconfigure")
    if capabilities_of_release(sandbox.state.version).replaces_daemons:
        for record, argv in running:
            sandbox.remember(_await_successor(record, argv))


def raise_job_ids(sandbox: Sandbox, first: int) -> None:
    """Make the next job get the id `first`, or a higher one if that is taken already.

    slurm.conf(5), FirstJobId. Raises SlurmError when slurmctld does not answer.
    """
    set_option(sandbox, "FirstJobId", str(first))


def _await_successor(record: DaemonRecord, argv: tuple[str, ...]) -> DaemonRecord:
    """Wait for the process that replaces a daemon: it has the same command line, and stays.

    The PID file tells nothing: a daemon that is held up removes it on leaving, after its successor
    has written it (seen with 24.11.5). Children of the successor come later than itself.
    """
    found: list[Process] = []

    def replaced() -> bool:
        if is_alive(record.identity):
            return False
        found[:] = (one for one in all_processes() if read_command_line(one.pid) == argv)
        return bool(found)

    if await_condition(replaced, _REPLACED_TIMEOUT_SECONDS):
        first = min(found, key=lambda process: process.identity.start_ticks)
        return DaemonRecord(record.name, first.identity)
    raise SlurmUnreachableError(f"{record.name} did not come back after `scontrol reconfigure`")
