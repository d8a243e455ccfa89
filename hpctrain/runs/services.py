"""Finds services: directories beside those of runs that have a `service.yaml`.

Belongs here: finding one by its id. Does not belong here: what is in one (`serve_status`).
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from hpctrain.base.errors import NoSuchRunError, UsageError
from hpctrain.records.find import is_service
from hpctrain.records.service_layout import ServiceLayout


def all_services(runs: Path) -> list[ServiceLayout]:
    """The services of a directory of runs, by id; none where there is no such directory.

    Those that others keep private are left out.
    """
    try:
        with os.scandir(runs.absolute()) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"{runs} cannot be read: {error.strerror}") from error
    found = [runs.absolute() / name for name in sorted(names) if not name.startswith(".")]
    return [ServiceLayout(directory) for directory in found if is_service(directory)]


def find_service(runs: Path, name: str) -> ServiceLayout:
    """Find the service of that id, or the only one whose id starts with `name`.

    Raises NoSuchRunError (with the nearest ids), or UsageError when the prefix is ambiguous.
    """
    services = all_services(runs)
    exact = [one for one in services if one.service_id == name]
    matches = exact or [one for one in services if name and one.service_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(f"`{one.service_id}`" for one in matches)
        raise UsageError(f"`{name}` is the start of several services: {ids}")
    near = difflib.get_close_matches(name, [one.service_id for one in services], n=3, cutoff=0.5)
    hint = "did you mean " + " or ".join(f"`{one}`" for one in near) + "?" if near else None
    raise NoSuchRunError(
        f"no service `{name}` in {runs}",
        hint=hint or ("`hpctrain serve up` starts one" if not services else None),
    )
