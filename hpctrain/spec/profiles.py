"""Finds cluster profiles by name: those of $HPCTRAIN_PROFILE_PATH, then the packaged ones.

Belongs here: the search path from the environment. Does not belong here: reading and merging
profiles (`hpctrain.spec.loader`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.spec.loader import Loaded, find_profile, load_profile

if TYPE_CHECKING:
    from hpctrain.spec.profile import ClusterProfile

PROFILE_PATH_VARIABLE = "HPCTRAIN_PROFILE_PATH"


def profile_search_path() -> list[Path]:
    """List the directories of $HPCTRAIN_PROFILE_PATH; packaged profiles come after them."""
    entries = os.environ.get(PROFILE_PATH_VARIABLE, "").split(os.pathsep)
    return [Path(entry) for entry in entries if entry]


def load_named_profile(name: str) -> Loaded[ClusterProfile]:
    """Read a profile by its name or path. Raises InvalidInputError with all problems."""
    search_path = profile_search_path()
    return load_profile(find_profile(name, search_path), search_path)
