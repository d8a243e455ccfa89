"""What an administrator installs to watch runs: rules, dashboards, provisioning, examples.

Belongs here: which files there are and where they are written. Does not belong here: their
contents (`hpctrain/observe`), installing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import UsageError


@dataclass(frozen=True)
class MonitoringFile:
    """One file, below the directory that is written."""

    path: PurePosixPath
    text: str


def monitoring_files() -> list[MonitoringFile]:
    """Collect the packaged files: examples, alert rules, dashboards and their provisioning."""
    observe = resources.files("hpctrain.observe")
    files = _below(observe / "monitoring_files", PurePosixPath())
    for directory, suffix, place in (
        ("rules", ".yaml", PurePosixPath("rules")),
        ("dashboards", ".json", PurePosixPath("grafana/dashboards")),
    ):
        source = observe / directory
        if source.is_dir():
            files += [one for one in _below(source, place) if one.path.suffix == suffix]
    return sorted(files, key=lambda one: one.path)


def _below(directory: Traversable, place: PurePosixPath) -> list[MonitoringFile]:
    found = []
    for entry in directory.iterdir():
        if entry.is_dir():
            found += _below(entry, place / entry.name)
        else:
            found.append(MonitoringFile(place / entry.name, entry.read_text()))
    return found


def write_monitoring(directory: Path, *, force: bool) -> list[MonitoringFile]:
    """Write the files; without `force` nothing is written if one would replace another text."""
    files = monitoring_files()
    changed = [str(one.path) for one in files if _differs(directory / one.path, one.text)]
    if changed and not force:
        raise UsageError(
            f"{directory} has other files of these names: {', '.join(changed)}",
            "another directory, or --force to replace them",
        )
    for one in files:
        path = directory / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, one.text)
    return files


def _differs(path: Path, text: str) -> bool:
    """Whether something else stands there."""
    if not path.exists():
        return False
    return not path.is_file() or path.read_bytes() != text.encode()
