"""Renames fields of profiles that earlier versions had, copies of which are in run directories.

Belongs here: the former names and what they mean now. Does not belong here: reading files
(`loader`), the fields themselves (`profile`).
"""

from __future__ import annotations

from hpctrain.spec.positions import Parsed


def rename_former_fields(parsed: Parsed) -> None:
    """Replace `slurm.all_memory` by `slurm.memory`; a problem where a file has both."""
    slurm = parsed.data.get("slurm") if isinstance(parsed.data, dict) else None
    if not isinstance(slurm, dict) or not isinstance(slurm.get("all_memory"), bool):
        return
    place = parsed.values.pop(("slurm", "all_memory"))
    if "memory" in slurm:
        parsed.problems.append(place.problem("`slurm.all_memory` is `slurm.memory` now: remove it"))
    parsed.values["slurm", "memory"] = place
    slurm["memory"] = "auto" if slurm.pop("all_memory") else "none"
