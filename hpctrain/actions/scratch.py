"""Find the directory on each node's own disk for an offload to NVMe: the spec's or the site's.

Belongs here: finding it. Does not belong here: whether it exists on the nodes (the trainer checks).
"""

from __future__ import annotations

from operator import attrgetter
from typing import cast

from hpctrain.errors import InvalidInputError
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


def with_scratch(document: RunSpec, spec: Loaded[RunSpec], site: ClusterProfile) -> RunSpec:
    """Fill in the engine's directory (`nvme_directory`) if something is offloaded to NVMe.

    Raises InvalidInputError where neither the spec nor the profile names a directory.
    """
    abilities = document.engine.abilities
    homes = ("optimizer.offload", abilities.weight_home)
    fields = [field for field in homes if field and attrgetter(field)(document) == "nvme"]
    target = abilities.nvme_directory
    if target is None or not fields or attrgetter(target)(document):
        return document
    local = next((system.path for system in site.filesystems if system.kind == "local"), None)
    if local is None:
        message = (
            f"`{fields[0]}`: profile {site.name} has no file system of kind `local` to offload to"
        )
        hint = f"name a directory on each node's NVMe: `{target}`"
        raise InvalidInputError([spec.problem(fields[0], message, hint)])
    section, _, name = target.rpartition(".")
    value: object = local
    while name:  # copy each section that contains the field, from the innermost outwards
        inside = attrgetter(section)(document) if section else document
        value = inside.model_copy(update={name: value})
        section, _, name = section.rpartition(".")
    return cast(RunSpec, value)
