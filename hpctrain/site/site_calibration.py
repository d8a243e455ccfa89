"""The file with what a site has measured: which one it is, what it holds already, writing it.

Belongs here: NAME.calibration.yaml and the profile that takes it. Does not belong here: what is
measured and learned (`calibrate`, `calibrate_runs`, `calibrate_service`), reading it for a plan
(`hpctrain.spec.loader`).
"""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import StorageError
from hpctrain.spec.calibration import SiteCalibration
from hpctrain.spec.loader import (
    CALIBRATION_SUFFIX,
    PACKAGED_PROFILES,
    Loaded,
    calibrated_profile,
    calibration_file,
    find_profile,
    load_named_profile,
    load_plain_profile,
    profile_search_path,
)
from hpctrain.spec.profile import ClusterProfile

_HEADER = """\
# Measured on this cluster; written by `hpctrain calibrate`. Beside its profile it is used, else
# name it in `calibration` of the profile. Deleted, the packaged figures hold again. Shares are of
# the data sheet, bandwidths per GPU (docs/gpu.md); `learned` are logarithms (docs/certainty.md).
"""


@dataclass(frozen=True)
class CalibrationTarget:
    """Where `calibrate` writes: `path`, and the profile with what that file holds so far."""

    path: Path
    profile: Loaded[ClusterProfile]

    @property
    def before(self) -> SiteCalibration | None:
        """What was measured before; None where there is nothing yet."""
        found = self.profile.document.calibration
        return found if isinstance(found, SiteCalibration) else None


def calibration_target(name: str, output: Path | None) -> CalibrationTarget:
    """Find the file to write for a profile, and read what it holds.

    `output`; else the file that the profile names or that lies beside it, else
    NAME.calibration.yaml beside it, of a packaged profile in the current directory. A new file
    goes on from what the profile takes today. Raises InvalidInputError.
    """
    search_path = profile_search_path()
    file = find_profile(name, search_path)
    profile = load_plain_profile(file, search_path)
    taken = calibration_file(profile, file)
    directory = Path() if file.parent == PACKAGED_PROFILES else file.parent
    path = output or taken or directory / f"{profile.document.name}{CALIBRATION_SUFFIX}"
    held = next((one for one in (path, taken) if one is not None and one.is_file()), None)
    if held is None:
        return CalibrationTarget(path, profile)
    return CalibrationTarget(path, calibrated_profile(profile, held))


def write_site_calibration(path: Path, site: SiteCalibration) -> None:
    """Write the file that a profile takes. Raises StorageError."""
    try:
        replace_text(path, _HEADER + _yaml(site))
    except OSError as error:
        hint = "write it elsewhere with --output FILE, and name it in a profile: `calibration`"
        raise StorageError(f"{path}: cannot be written: {error.strerror}", hint) from None


def how_plans_use(path: Path, name: str | None) -> str:
    """Say whether plans use the file that was written for a profile, and else what to do.

    `name`: None where no profile was given.
    """
    if name is None:
        return (
            f"no plan uses it yet; to use it, write `calibration: {path.absolute()}` into the "
            "profile of the cluster"
        )
    place = load_named_profile(name).places.get("calibration.gpu")
    if place is not None and Path(place.file).resolve() == path.resolve():
        return "plans use it from now on, and say so; to undo it, delete the file"
    file = find_profile(name, profile_search_path())
    if file.parent == PACKAGED_PROFILES:
        return (
            f"no plan uses it yet; to use it, write a profile with `extends: {name}`, a `name` of "
            f"its own and `calibration: {path.absolute()}`"
        )
    line = path.name if path.resolve().parent == file.resolve().parent else path.absolute()
    return f"no plan uses it yet; to use it, write `calibration: {line}` into {file}"


def _yaml(site: SiteCalibration) -> str:
    """Format the document; lists of figures take one line each."""
    from ruamel.yaml import YAML

    yaml, stream = YAML(), StringIO()
    yaml.width = 4096  # one line each, whatever its length
    values = site.model_dump(mode="json", exclude_none=True)
    yaml.dump({name: _in_lines(value) for name, value in values.items() if value != {}}, stream)
    return stream.getvalue()


def _in_lines(value: Any) -> Any:
    """Mark lists without mappings and lists in them as written in one line."""
    from ruamel.yaml.comments import CommentedSeq

    if isinstance(value, dict):
        return {name: _in_lines(inner) for name, inner in value.items()}
    if not isinstance(value, list):
        return value
    found = CommentedSeq([_in_lines(inner) for inner in value])
    if not any(isinstance(inner, dict | list) for inner in value):
        found.fa.set_flow_style()
    return found
