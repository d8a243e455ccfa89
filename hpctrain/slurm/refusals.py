"""What to do about a refusal of Slurm, by Slurm's own words.

The words are those of slurm_strerror (src/common/slurm_errno.c of Slurm 22.05 to 26.05). A hint is
all that follows from them: no decision does. Belongs here: words and hints. Does not belong here:
telling a refusal from no answer (`parse`, `answers`).
"""

from __future__ import annotations

# Part of a message, in lower case -> what helps. The first that is found is taken.
_HINTS = (
    (
        "invalid account or account/partition",
        "`resources.account` in the spec or `slurm.account` in the profile: "
        "`sacctmgr show assoc user=$USER format=account,partition,qos` lists yours",
    ),
    (
        "invalid qos",
        "`resources.qos` in the spec or `slurm.qos` in the profile: "
        "`sacctmgr show assoc user=$USER format=account,qos` lists yours",
    ),
    ("invalid partition", "`sinfo -s` lists partitions; `hpctrain profile check` compares them"),
    (
        "requested node configuration is not available",
        "no node of the partition has these GPUs, CPUs or this memory: `hpctrain profile check`",
    ),
    (
        "requested partition configuration not available",
        "the partition is down, or does not allow this size: `sinfo -s`",
    ),
    (
        "requested time limit is invalid",
        "`resources.walltime` is above the partition's limit: `sinfo -o '%P %l'`",
    ),
    (
        "job violates accounting/qos policy",
        "a limit of your account or QOS (jobs, GPUs, size, walltime): `hpctrain doctor`",
    ),
    ("memory specification can not be satisfied", "`resources.memory_per_node`, `slurm.memory`"),
    (
        "invalid generic resource",
        "`slurm.gpu_request` and `gpu.type` of the profile: `sinfo -o '%N %G'` lists what nodes "
        "have",
    ),
    ("node count specification invalid", "the partition allows other numbers of nodes: `sinfo -s`"),
    ("invalid feature specification", "`slurm.constraint` of the profile: `sinfo -o '%N %f'`"),
    ("invalid license", "`slurm.options` of the profile: `scontrol show licenses`"),
    ("requested reservation is invalid", "`resources.reservation`: `scontrol show reservation`"),
    ("kill job error", "only the owner of a job, and administrators, may end it"),
    (
        "access/permission denied",
        "the partition is for other groups, accounts or QOS: `scontrol show partition`",
    ),
    (
        "could not establish a configuration source",
        "is this a login node of the cluster? Clients find Slurm by /etc/slurm, $SLURM_CONF or DNS",
    ),
    ("script contains dos line breaks", "a template with the line ends of Windows"),
)


def hint_about(words: str) -> str | None:
    """Return what helps against a refusal; None for words that are not known."""
    small = words.lower()
    return next((hint for part, hint in _HINTS if part in small), None)
