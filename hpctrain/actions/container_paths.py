"""Find inputs of a run that its container will not see.

Only what a container mounts exists in it. pyxis mounts the run directory (as hpctrain's scripts
have it) and what profile and spec list; apptainer the home directory, /tmp and /var/tmp as well
(its `mount home` and `mount tmp`, apptainer.conf). Belongs here: comparing paths. Does not belong
here: options of a launcher (`hpctrain.render.containers`), or whether a path exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.spec.profile.container import ContainerProfile


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
