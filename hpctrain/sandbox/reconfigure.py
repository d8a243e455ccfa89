"""Changing the configuration of a sandbox that is up.

Belongs here: single keys of slurm.conf that Slurm takes over while jobs run. Does not belong here:
the file as a whole (see `config`), which the next start writes anew.
"""

from __future__ import annotations

from hpctrain.errors import SlurmUnreachableError
from hpctrain.sandbox.daemons import read_record
from hpctrain.sandbox.processes import await_condition, find_process
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.state import DaemonRecord

# From here on `scontrol reconfigure` has daemons replace themselves by new processes (seen on
# 24.11.5; release notes of 23.11).
_REPLACES_DAEMONS = (23, 11)
_REPLACED_TIMEOUT_SECONDS = 30.0


def set_option(sandbox: Sandbox, key: str, value: str | None) -> None:
    """Give `key` of slurm.conf this value, or none, and have all daemons read the file again.

    Raises SlurmError when slurmctld refuses it, SlurmUnreachableError when a daemon does not come
    back.
    """
    conf = sandbox.paths.slurm_conf
    lines = [one for one in conf.read_text().splitlines() if not one.startswith(f"{key}=")]
    if value is not None:
        lines.append(f"{key}={value}")
    conf.write_text("\n".join(lines) + "\n")
    before = [record for record in sandbox.state.daemons if _reads_its_configuration(record)]
    sandbox.command("scontrol", "reconfigure")
    if sandbox.state.version >= _REPLACES_DAEMONS:
        for record in before:
            sandbox.remember(_successor(sandbox, record))


def raise_job_ids(sandbox: Sandbox, first: int) -> None:
    """Have the next job get the id `first`, or a higher one if that is taken already.

    slurm.conf(5), FirstJobId. Raises SlurmError when slurmctld does not answer.
    """
    set_option(sandbox, "FirstJobId", str(first))


def _reads_its_configuration(record: DaemonRecord) -> bool:
    """A daemon of Slurm that lives and is not frozen."""
    process = find_process(record.identity.pid)
    alive = process is not None and process.identity == record.identity and process.state != "T"
    return alive and record.name != "munged"


def _successor(sandbox: Sandbox, record: DaemonRecord) -> DaemonRecord:
    """The process that has taken the place of a daemon, by the PID file that it has written."""

    def replaced() -> bool:
        return read_record(sandbox.paths, record.name) not in (None, record)

    if await_condition(replaced, _REPLACED_TIMEOUT_SECONDS):
        found = read_record(sandbox.paths, record.name)
        if found is not None:
            return found
    raise SlurmUnreachableError(f"{record.name} did not come back after `scontrol reconfigure`")
