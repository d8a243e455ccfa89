"""Find what may go wrong with a run at its site before it is submitted.

Grace of preemption, the end of a reservation, copies of data, and inputs that a container will not
see: only what a container mounts exists in it. pyxis mounts the run directory (as hpctrain's
scripts have it) and what profile and spec list; apptainer the home directory, /tmp and /var/tmp as
well (its `mount home` and `mount tmp`, apptainer.conf). Belongs here: warnings, and refusals that
the profile wants in their place. Does not belong here: copying (`hpctrain.train.startup`),
options of a launcher (`hpctrain.job.render.containers`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path, PurePath

from hpctrain.base.errors import InvalidInputError, LimitError, Problem, Refusal
from hpctrain.base.units import short_bytes, short_duration
from hpctrain.job.render.containers import run_container
from hpctrain.job.render.environment import JobEnvironment, login_names
from hpctrain.job.render.warning_lead import short_grace
from hpctrain.plan.job import Job, TrainingJob
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile.software import ContainerProfile
from hpctrain.spec.run import RunSpec

_WORTH_SAYING_SECONDS = 300.0


def site_warnings(
    job: TrainingJob,
    source: Loaded[RunSpec],
    inputs: Sequence[str],
    run_directory: Path,
    environment: JobEnvironment,
) -> tuple[str, ...]:
    """List what may go wrong at this site; paths of the job's spec and `inputs` are absolute.

    `source` has the places of the spec's fields. Raises LimitError and InvalidInputError for what
    the profile refuses instead.
    """
    staging = staging_warnings(job, source, inputs)
    spec, software = job.spec, job.profile.software
    copied = software.scratch if spec.data.stage else None
    read = [*inputs, *filter(None, (spec.data.cache, spec.model.pretrained, copied))]
    container = run_container(spec.container, software.container)
    return (
        *staging,
        *filter(None, (short_grace(job),)),
        *ungiven_warnings(job, environment),
        *unmounted_warnings(container, read, run_directory),
        *registry_warnings(container, job.plan.nodes.nodes),
    )


def ungiven_warnings(job: Job, environment: JobEnvironment) -> tuple[str, ...]:
    """Warn of each variable that a field needs in the job, and that nothing seems to set there.

    A warning only, because a site's prologue of tasks may set it (slurm.conf(5), TaskProlog).
    """
    return tuple(
        f"`{field}`: {name} is not set in jobs of profile {job.profile.name}, which inherit some "
        f"variables only: `slurm.inherit: [{name}]` of the profile passes it on from where you "
        "submit, unless the site sets it in each job"
        for field, name, passed in login_names(job, environment)
        if not passed
    )


def refuse_ended_reservation(job: Job, now: datetime) -> None:
    """Raise LimitError where an attempt that started now would outlast the site's reservation.

    sbatch(1), --reservation: Slurm does not start a job that it could not finish within it.
    """
    slurm, own = job.profile.slurm, job.spec.resources.reservation
    if slurm.reservation_end is None or own not in (None, slurm.reservation):
        return
    limit, left = job.walltime, max(0.0, (slurm.reservation_end - now).total_seconds())
    if float(limit) > left:
        message = (
            f"walltime {limit.slurm()} is longer than reservation {slurm.reservation} "
            f"lasts, which ends in {short_duration(left)}: the job would never start"
        )
        raise LimitError(
            [Refusal(message, "resources.walltime")],
            hint="a shorter `resources.walltime`, or another `resources.reservation`",
        )


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


def unmounted_warnings(
    container: ContainerProfile | None, paths: Iterable[str], run_directory: Path
) -> tuple[str, ...]:
    """Return one warning for each absolute path that the container does not have at its place.

    Warnings only, because the site's configuration of enroot or apptainer may mount more; where
    `site_mounts` says what that is, InvalidInputError is raised instead. Nothing is known where a
    file outside the profile has the mounts (edf, uenv), or where they depend on the job.
    """
    if container is None:
        return ()
    mounted = container.mounted_directories
    if mounted is None or (container.launcher in ("edf", "uenv") and not container.site_mounts):
        return ()
    seen = [run_directory.absolute(), *map(Path, mounted)]
    options = {option.partition("=")[0] for option in container.options}
    if not container.starts_by_srun and "home" not in container.not_mounted:
        seen.append(Path.home())
    if not container.starts_by_srun and "tmp" not in container.not_mounted:
        seen += [Path("/tmp"), Path("/var/tmp")]
    if "--container-mount-home" in options:
        seen.append(Path.home())
    hidden = [
        path
        for path in dict.fromkeys(paths)
        if not any(PurePath(path).is_relative_to(place) for place in seen)
    ]
    problems = [
        (
            f"the container does not mount {path}",
            f"add `{PurePath(path).parent}:{PurePath(path).parent}` to `software.container.mounts` "
            "of the profile, or to `container.mounts` of the spec",
        )
        for path in hidden
    ]
    if problems and container.site_mounts is not None:
        raise InvalidInputError([Problem(message, hint=hint) for message, hint in problems])
    return tuple(
        f"{message}: {hint}, unless the site mounts it anyway" for message, hint in problems
    )


def registry_warnings(container: ContainerProfile | None, nodes: int) -> tuple[str, ...]:
    """Warn of an image that every node fetches from its registry at every launch."""
    if container is None or not container.registry_image or container.cache is not None:
        return ()
    if "--container-name" in {option.partition("=")[0] for option in container.options}:
        return ()  # a later launch of the same job finds it unpacked (pyxis README)
    return (
        f"each launch fetches {container.image} on {nodes} nodes: `software.container.cache` "
        "imports it once, and `--container-name` keeps it for the launches of one job",
    )
