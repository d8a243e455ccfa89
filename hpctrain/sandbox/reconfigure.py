"""Changing the configuration of a sandbox that is up.

Belongs here: single keys of slurm.conf that Slurm takes over while jobs run. Does not belong here:
the file as a whole (see `config`), which the next start writes anew.
"""

from __future__ import annotations

from hpctrain.sandbox.sandbox import Sandbox


def set_option(sandbox: Sandbox, key: str, value: str | None) -> None:
    """Give `key` of slurm.conf this value, or none, and have all daemons read the file again.

    Raises SlurmError when slurmctld refuses it.
    """
    conf = sandbox.paths.slurm_conf
    lines = [one for one in conf.read_text().splitlines() if not one.startswith(f"{key}=")]
    if value is not None:
        lines.append(f"{key}={value}")
    conf.write_text("\n".join(lines) + "\n")
    sandbox.command("scontrol", "reconfigure")


def raise_job_ids(sandbox: Sandbox, first: int) -> None:
    """Have the next job get the id `first`, or a higher one if that is taken already.

    slurm.conf(5), FirstJobId. Raises SlurmError when slurmctld does not answer.
    """
    set_option(sandbox, "FirstJobId", str(first))
