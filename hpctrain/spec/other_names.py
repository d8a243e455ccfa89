"""Hints for keys that people write and that stand elsewhere or have another name here.

Belongs here: such keys, and where their meaning stands. Does not belong here: keys of earlier
versions, which still work (`former_fields`), and misspelt ones (`fields`).
"""

from __future__ import annotations

from hpctrain.spec.positions import Path
from hpctrain.spec.slurm_options import available_options, owned_options

_IN_A_FILE = (
    "who knows it can write into your channel, and this file is copied into every run: put it into "
    "a file that only you may read (`chmod 600`), and name that: `{field}_file: PATH`"
)
# Of specs and profiles alike.
_SECRETS = {
    "notify.channels.url": _IN_A_FILE.format(field="url"),
    "notify.channels.token": _IN_A_FILE.format(field="token"),
}
_HINTS = {
    "template": "use `--template-dir` of `hpctrain submit` (docs/templates.md)",
    "slurm.extra_sbatch": "use `slurm.options.sbatch`",
    "slurm.extra_srun": "use `slurm.options.srun`",
    "slurm.partitions[].name": (
        "where the site chooses the partition: a name of yours, and `request: false`"
    ),
    "slurm.partitions[].gpu": "its type is `gpu: {type: NAME}`",
    "slurm.partitions[].nodes": "their number is `nodes: {count: NUMBER}`",
    "slurm.partitions[].gres": (
        "use `gpu.type` of the partition with `slurm.gpu_request: gres-typed`, or "
        "`gpus-per-node-typed`"
    ),
    "software.setup": "commands stand in a shell file, whose path this is",
    "software.singularity": "use `software.container` with `launcher: singularity`",
    "software.staging": (
        "the directory is `software.scratch` with `scratch_capacity`; specs ask for copies with "
        "`data: {stage: true}`"
    ),
    "software.uenv": "use `software.container` with `launcher: uenv`",
    "limits.max_running": "use `limits.max_submit` for jobs, or `limits.grp_gpus` for GPUs at once",
}
# Names that people give the key of W&B. No document contains one.
_WANDB_KEYS = frozenset({"api_key", "apikey", "key", "key_file", "password", "secret", "token"})
_WANDB_HINT = (
    "no key stands in a spec: `wandb login` on the machine that uploads; for `mode: online` name "
    "WANDB_API_KEY in `environment.inherit`"
)


def key_of_spec(path: Path) -> str | None:
    """Return what to do instead of writing a key into a spec; None if it is no secret."""
    if path[:2] == ("tracking", "wandb") and str(path[-1]).lower() in _WANDB_KEYS:
        return _WANDB_HINT
    return None


def known_secret(path: Path) -> str | None:
    """Return where a secret belongs that stands at `path`; None for any other key."""
    return _SECRETS.get(".".join(part for part in path if isinstance(part, str)))


def known_elsewhere(path: Path) -> str | None:
    """Return where the meaning of a profile's key stands; None if nothing is known of it.

    Any option of sbatch or srun below `slurm` is one of `slurm.options`, or has a field.
    """
    parts = [str(part) for part in path if isinstance(part, str)]
    key = ".".join(parts).replace("slurm.partitions.", "slurm.partitions[].")
    if key in _HINTS or len(parts) != 2 or parts[0] != "slurm":
        return _HINTS.get(key)
    name = parts[1].replace("_", "-")
    for command in ("sbatch", "srun"):
        if name in available_options(command):
            return f"use `slurm.options.{command}`, as `{name}: VALUE`"
    return owned_options("sbatch").get(name)
