"""The directory on each node's own disk that an offload to NVMe needs: the spec's or the site's.

Belongs here: finding it. Does not belong here: whether it exists on the nodes (the trainer looks).
"""

from __future__ import annotations

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


def with_scratch(document: RunSpec, spec: Loaded[RunSpec], site: ClusterProfile) -> RunSpec:
    """`document` with `engine.deepspeed.nvme_path` filled in where something goes to NVMe.

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
        raise InvalidInputError([_no_directory(asking[0], spec, site)])
    own = own.model_copy(update={"nvme_path": local})
    engine = document.engine.model_copy(update=dict(deepspeed=own))
    return document.model_copy(update={"engine": engine})


def _no_directory(field: str, spec: Loaded[RunSpec], site: ClusterProfile) -> Problem:
    message = f"`{field}`: profile {site.name} has no file system of kind `local` to offload to"
    hint = "name a directory on each node's NVMe: `engine.deepspeed.nvme_path`"
    return spec.problem(field, message, hint)
