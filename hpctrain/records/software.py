"""Records of the software and the GPUs that the ranks of each launch have found by importing.

One line of `software.jsonl` for all nodes of a launch that have the same. Belongs here: the format,
reading and writing it. Does not belong here: finding the facts (see `hpctrain.train.software`), or
what follows from them (see `hpctrain.train.software_agreement`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from hpctrain.base.durable import append_line, replace_text
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record, RecordPart, parse_record


class Library(RecordPart):
    """An optional library: its version, or why it cannot be imported; neither: not installed."""

    version: str | None = None
    error: str | None = None

    @property
    def imported(self) -> bool:
        return self.version is not None

    def is_at_least(self, least: tuple[int, int]) -> bool:
        """Return whether the version is known to be `least` or newer; 2.7.0.dev0 is 2.7."""
        numbers = re.match(r"(\d+)\.(\d+)", self.version or "")
        return numbers is not None and (int(numbers[1]), int(numbers[2])) >= least

    def __str__(self) -> str:
        if self.version is not None:
            return self.version
        return "not installed" if self.error is None else f"cannot be imported ({self.error})"


class SoftwareFacts(RecordPart):
    """What one rank has found.

    `code` is the digest in the name of the archive from which the rank imports hpctrain; None where
    it imports an installed one.
    `cuda_build` and `nccl` are the versions that torch was built with, None for a build without
    CUDA; `driver_cuda` is the newest CUDA that the driver supports. `gpus` are the names of the
    GPUs that the rank sees, `capabilities` their compute capabilities (9.0: Hopper); `gpu_error`
    tells why CUDA cannot be used. `attention` lists the attention kernels of TransformerEngine that
    can be imported. `apex_wgrad`: Apex's extension `fused_weight_gradient_mlp_cuda`. `deep_ep` and
    `hybrid_ep`: the two ways of DeepEP to send tokens to experts. `open_files` is the soft limit
    RLIMIT_NOFILE. `remarks` are warnings of the engine about its library.
    """

    hpctrain: str | None = None
    code: str | None = None
    python: str
    torch: str
    cuda_build: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    nccl: str | None = None
    gpus: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    gpu_error: str | None = None
    megatron_core: str | None = None
    transformer_engine: Library = Library()
    attention: tuple[str, ...] = ()
    apex_wgrad: Library = Library()
    flash_attention: Library = Library()
    deep_ep: Library = Library()
    hybrid_ep: Library = Library()
    triton: Library = Library()
    compiler: str | None = None
    open_files: int
    remarks: tuple[str, ...] = ()


class SoftwareRecord(Record):
    """The facts of some nodes of one launch; `ranks` counts the ranks that have found them.

    `changed` says what is not as the run's `software.lock` has it.
    """

    epoch: int
    nodes: tuple[str, ...]
    ranks: int
    facts: SoftwareFacts
    changed: tuple[str, ...] = ()


def write_software(run: RunLayout, records: Iterable[SoftwareRecord]) -> None:
    """Append the lines of one launch. Raises OSError."""
    for record in records:
        append_line(run.software, record.model_dump_json(exclude_defaults=True), mode=0o600)


def read_software(run: RunLayout) -> list[SoftwareRecord]:
    """Read the lines of all launches, in the order written; a torn line is left out.

    Raises NewerFormatError when a newer hpctrain has written the file.
    """
    try:
        lines = run.software.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = (parse_record(run.software, line, SoftwareRecord) for line in lines)
    return [record for record in found if record is not None]


def of_newest_launch(records: Sequence[SoftwareRecord]) -> list[SoftwareRecord]:
    """Select the records of the newest launch that has any."""
    newest = max((record.epoch for record in records), default=0)
    return [record for record in records if record.epoch == newest]


# -- What a run trains with, by name (`software.lock`): written by the first launch that trains -


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
