"""Read fields that earlier versions had, copies of which are in run directories.

Belongs here: the former names and what they mean now, and the defaults of fields that have gone.
Does not belong here: reading files (`loader`), the fields themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.spec.positions import Parsed

# Fields that have gone, with the default that each run directory has of them: in specs, profiles,
# `train.json` and `supervise.json`, where some have one path.
GONE: Mapping[str, object] = {
    **dict.fromkeys(("profile.shapes", "profile.allocations", "profile.stacks"), False),
    "profile.start": None,
    "profile.count": 1,
    "profile.largest": "512MiB",
    "profile.flops": False,
    "flops_steps": [],
    **dict.fromkeys(("notify.channels.url_env", "notify.channels.token_env"), None),
    "supervise.storm_window": "00:30:00",
    "supervise.rollback.other_nodes": True,
    "engine.ddp.powersgd_rank": 4,
    "ddp.powersgd_rank": 4,
    "optimizer.name": "adamw",
    "limits.short_grace": "warn",
    "network.islands.gpu": None,
    "slurm.partitions.network.islands.gpu": None,
    "traffic.burstiness": 1.0,
}


def forget_former_fields(values: Any, *, only_defaults: bool) -> None:
    """Remove fields that have gone from the values of a document.

    `only_defaults`: those with another value stay, to be refused as unknown, because nobody would
    act on them. What an earlier version has written for a run that goes on is read in any case.
    """
    for path, default in GONE.items():
        *sections, name = path.split(".")
        for section in _sections(values, sections):
            found = section.get(name, default)
            if not only_defaults or (type(found), found) == (type(default), default):
                section.pop(name, None)


def _sections(values: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """List the sections at a path, also those of each item of a list."""
    if isinstance(values, list):
        for item in values:
            yield from _sections(item, path)
    elif isinstance(values, dict) and path:
        yield from _sections(values.get(path[0]), path[1:])
    elif isinstance(values, dict):
        yield values


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
