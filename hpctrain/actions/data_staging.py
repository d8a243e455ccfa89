"""Check whether the data of a run can be copied to its nodes, and estimate how long that takes.

Belongs here: runs with `data.stage`, before they are submitted. Does not belong here: copying
(`hpctrain.train.data_copies`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath

from hpctrain.errors import InvalidInputError, LimitError, Refusal
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.loader import Loaded
from hpctrain.spec.run import RunSpec
from hpctrain.units import short_bytes, short_duration

_WORTH_SAYING_SECONDS = 300.0


def staging_warnings(
    job: TrainingJob, source: Loaded[RunSpec], files: Sequence[str]
) -> tuple[str, ...]:
    """Return a warning if each launch begins with minutes of copying `files` (absolute paths).

    Files that do not exist here count nothing. `source` has the places of the spec's fields. Raises
    InvalidInputError where the engine or the profile allows no copies, LimitError if they do not
    fit, or take longer than `engine.startup_timeout`.
    """
    document, site = job.spec, job.profile
    if not document.data.stage:
        return ()
    message = hint = None
    if document.engine.abilities.assembly is None:
        message = f"engine {document.engine.name} reads its data with a program of its own"
    elif site.software.scratch_capacity is None:
        message = f"profile {site.name} has no disk on its nodes for copies of data"
        hint = "`software.scratch` and `software.scratch_capacity` in the profile"
    if message is not None:
        raise InvalidInputError([source.problem("data.stage", f"`data.stage`: {message}", hint)])
    capacity = site.software.scratch_capacity
    assert capacity is not None
    size_bytes = sum(os.path.getsize(path) for path in set(files) if os.path.exists(path))
    if size_bytes > capacity:
        message = (
            f"`data.stage`: the data has {short_bytes(size_bytes)}, `software.scratch_capacity` of "
            f"profile {site.name} is {short_bytes(capacity)}"
        )
        raise LimitError(
            [Refusal(message, "data.stage")],
            hint="`data: {stage: false}` reads it where it is",
        )
    system = site.filesystem_of(PurePath(files[0])) if files else None
    if system is None:
        return ()
    # all nodes at most: stages within a pipeline read nothing
    network, nodes = site.network, job.plan.nodes.nodes
    seconds = max(
        size_bytes * nodes / float(system.read_bandwidth),
        size_bytes / (network.nics_per_node * float(network.nic_bandwidth)),
    )
    took = (
        f"copying {short_bytes(size_bytes)} to {nodes} nodes, about {short_duration(seconds)} at "
        f"the read bandwidth of {system.name}"
    )
    if seconds > float(document.engine.startup_timeout):
        message = (
            f"`data.stage`: {took}, which is longer than `engine.startup_timeout` "
            f"({document.engine.startup_timeout})"
        )
        raise LimitError(
            [Refusal(message, "data.stage")],
            hint="a longer `engine.startup_timeout`, or `data: {stage: false}`",
        )
    if seconds < _WORTH_SAYING_SECONDS:
        return ()
    return (f"the first launch of a job begins with {took}",)
