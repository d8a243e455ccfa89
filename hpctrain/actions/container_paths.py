"""Find inputs of a run that its container will not see.

Only what a container mounts exists in it. pyxis mounts the run directory (as hpctrain's scripts
have it) and what the profile lists; apptainer the home directory and /tmp as well (its `mount home`
and `mount tmp`, apptainer.conf). Belongs here: comparing paths. Does not belong here: options of a
launcher (see `hpctrain.render.script`), or whether a path exists.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from hpctrain.spec.profile.software import ContainerProfile


def unmounted_warnings(
    container: ContainerProfile | None, paths: Iterable[str], run_directory: Path
) -> Iterator[str]:
    """Yield one warning for each absolute path that the container does not have at its place.

    A warning only: the site's own configuration of enroot or apptainer may mount more.
    """
    if container is None:
        return
    seen = [run_directory.absolute()]
    if container.launcher == "apptainer":
        seen += [Path.home(), Path(tempfile.gettempdir())]
    for mount in container.mounts:
        source, _, rest = mount.partition(":")
        target = rest.partition(":")[0] or source
        if PurePath(source) == PurePath(target):
            seen.append(Path(source))
    for path in dict.fromkeys(paths):
        if not any(PurePath(path).is_relative_to(place) for place in seen):
            directory = PurePath(path).parent
            yield (
                f"the container does not mount {path}: add `{directory}:{directory}` to "
                "`software.container.mounts` of the profile, unless the site mounts it anyway"
            )
