"""Build the environment of Slurm commands, without variables that change what they do.

squeue, sbatch and the others take options from SQUEUE_*, SBATCH_*, ... variables, so a line in a
.bashrc changes the format that we parse or the partition of the plan. Inside a job, sbatch takes
SLURM_* variables of that job as options of the new one (sbatch(1), INPUT ENVIRONMENT VARIABLES).
Belongs here: which variables are removed. Does not belong here: running commands (`process`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_OPTION_PREFIXES = (
    *("SALLOC_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_"),
    *("SLURM_", "SLURMD_"),
)
# Cluster and credentials: needed to reach Slurm at all.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables that change what a Slurm command does."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not name.startswith(_OPTION_PREFIXES)
    }


def with_only(environment: Mapping[str, str], names: Collection[str] | None) -> dict[str, str]:
    """Return the environment of an sbatch whose job inherits only `names`; None: everything.

    sbatch(1), --export: without that option the job gets the environment of sbatch as it is. With
    a list of names Slurm runs a login shell of the user on the node besides (`--get-user-env`),
    which takes up to two minutes and may hold the job. What sbatch needs to reach Slurm stays.
    """
    plain = without_options(environment)
    kept = set(plain) if names is None else _KEPT.union(names)
    return {name: value for name, value in plain.items() if name in kept}


def for_queries(environment: Mapping[str, str]) -> dict[str, str]:
    """As `without_options`, with English messages and UTC times.

    Not for sbatch, which by default passes its own environment to the job.
    """
    return {**without_options(environment), "LC_ALL": "C", "TZ": "UTC0"}
