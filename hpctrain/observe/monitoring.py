"""What an administrator installs to watch runs: rules, dashboards, provisioning, examples.

Belongs here: which files there are, variants of the rules for rehearsals, writing the files. Does
not belong here: their contents, what each alert means (docs/alerts.md), a Prometheus that loads
them (`hpctrain.sandbox.monitoring`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import UsageError

RULES = Path(__file__).with_name("rules") / "hpctrain-rules.yaml"
_WAIT = re.compile(r"^( +for: )(\d+)([smh])$", re.MULTILINE)
_UNIT_MILLISECONDS = {"s": 1_000, "m": 60_000, "h": 3_600_000}


def with_delays(rules: str, factor: float) -> str:
    """Multiply the time that each condition has to last before its alert fires."""

    def scaled(match: re.Match[str]) -> str:
        milliseconds = int(match[2]) * _UNIT_MILLISECONDS[match[3]] * factor
        return f"{match[1]}{round(milliseconds)}ms"

    return _WAIT.sub(scaled, rules)


# -- What an administrator installs to watch runs: rules, dashboards, provisioning, examples ----


@dataclass(frozen=True)
class MonitoringFile:
    """One file, below the directory that is written."""

    path: PurePosixPath
    text: str


def monitoring_files() -> list[MonitoringFile]:
    """Collect the packaged files: examples, alert rules, dashboards and their provisioning."""
    files = []
    for directory, pattern, place in (
        ("monitoring_files", "**/*", ""),
        ("rules", "*.yaml", "rules"),
        ("dashboards", "*.json", "grafana/dashboards"),
    ):
        source = Path(__file__).with_name(directory)
        for path in source.glob(pattern):
            if path.is_file():
                below = PurePosixPath(place, path.relative_to(source).as_posix())
                files.append(MonitoringFile(below, path.read_text()))
    return sorted(files, key=lambda one: one.path)


def write_monitoring(directory: Path, *, force: bool) -> list[MonitoringFile]:
    """Write the files; without `force` nothing is written if one would replace another text."""
    files = monitoring_files()
    changed = []
    for one in files:
        path = directory / one.path
        if path.exists() and (not path.is_file() or path.read_bytes() != one.text.encode()):
            changed.append(str(one.path))
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
