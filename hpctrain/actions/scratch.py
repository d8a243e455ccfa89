"""Finds the directory on each node's own disk for an offload to NVMe: the spec's or the site's.

Belongs here: finding it. Does not belong here: whether it exists on the nodes (the trainer looks).
"""

from __future__ import annotations

from hpctrain.errors import InvalidInputError
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


def with_scratch(document: RunSpec, spec: Loaded[RunSpec], site: ClusterProfile) -> RunSpec:
    """Fill in `engine.deepspeed.nvme_path` of `document` if something is offloaded to NVMe.

    Raises InvalidInputError where neither the spec nor the profile names a directory.
    """
    own = document.engine.deepspeed
    wants = {
        "optimizer.offload": document.optimizer.offload,
        "engine.deepspeed.offload_parameters": own.offload_parameters,
    }
    asking = [field for field, home in wants.items() if home == "nvme"]
    if document.engine.abilities.nvme_directory is None or not asking or own.nvme_path:
        return document
    local = next((one.path for one in site.filesystems if one.kind == "local"), None)
    if local is None:
        message = (
            f"`{asking[0]}`: profile {site.name} has no file system of kind `local` to offload to"
        )
        hint = "name a directory on each node's NVMe: `engine.deepspeed.nvme_path`"
        raise InvalidInputError([spec.problem(asking[0], message, hint)])
    own = own.model_copy(update={"nvme_path": local})
    engine = document.engine.model_copy(update=dict(deepspeed=own))
    return document.model_copy(update={"engine": engine})
