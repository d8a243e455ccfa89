"""What a run trains with, by name (`software.lock`): written by the first launch that trains.

Belongs here: the document, and what two of them differ in. Does not belong here: finding the facts
(`hpctrain.train.software`), what follows (`hpctrain.train.software_agreement`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from hpctrain.base.durable import replace_text
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record, parse_record

# Changes that are told one by one; of more packages, only how many.
_MOST_PACKAGES = 8


class SoftwareLock(Record):
    """Versions or digests by name; `epoch` is the launch that has found them.

    `parts`: what is always told, such as Python, torch, the driver. `packages`: those installed
    beside hpctrain, by their normalised names (PEP 503).
    """

    epoch: int
    parts: dict[str, str]
    packages: dict[str, str] = Field({})


def read_lock(run: RunLayout) -> SoftwareLock | None:
    """Return the lock of a run; None if it has none, or none that is complete.

    Raises NewerFormatError when a newer hpctrain has written it, OSError.
    """
    try:
        text = run.software_lock.read_bytes()
    except FileNotFoundError:
        return None
    return parse_record(run.software_lock, text, SoftwareLock)


def write_lock(run: RunLayout, lock: SoftwareLock) -> None:
    """Write the lock. Raises OSError."""
    replace_text(run.software_lock, lock.model_dump_json(indent=1), mode=0o600)


def changes(lock: SoftwareLock, now: SoftwareLock) -> tuple[str, ...]:
    """List what is not as it was: `torch 2.13.0 -> 2.14.0`; parts first."""
    packages = _changes(lock.packages, now.packages)
    more = len(packages) - _MOST_PACKAGES
    if more > 0:
        packages = [*packages[:_MOST_PACKAGES], f"{more} more packages"]
    return (*_changes(lock.parts, now.parts), *packages)


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]
