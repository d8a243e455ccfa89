"""Read and write `sandbox.json`, which lets another process find and stop a sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import UsageError
from hpctrain.sandbox.monitoring import Monitoring
from hpctrain.sandbox.paths import Ports, SandboxPaths, state_file
from hpctrain.sandbox.processes import ProcessId
from hpctrain.sandbox.shape import SandboxShape

_FORMAT = 1


@dataclass(frozen=True)
class DaemonRecord:
    """A daemon that was started: `munged`, `slurmctld`, `slurmd-NODE` or `prometheus`."""

    name: str
    identity: ProcessId


@dataclass(frozen=True)
class SandboxState:
    """Content of the file.

    `sockets` is the directory of sockets and spool; `version` is Slurm's. `slurm` is the directory
    of an unpacked Slurm, None for the machine's own. `monitoring` is None without Prometheus.
    """

    shape: SandboxShape
    sockets: Path
    ports: Ports
    version: tuple[int, int]
    daemons: tuple[DaemonRecord, ...] = ()
    slurm: Path | None = None
    monitoring: Monitoring | None = None
    format: int = _FORMAT

    def with_daemon(self, record: DaemonRecord) -> tuple[DaemonRecord, ...]:
        """Return the daemons with `record` replacing the record of the same name."""
        return (*(old for old in self.daemons if old.name != record.name), record)


def read_state(directory: Path) -> SandboxState:
    """Read the file of a sandbox. Raises UsageError when `directory` holds none."""
    path = state_file(directory)
    try:
        state = _adapter().validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"there is no sandbox in {directory}", "make one with: hpctrain sandbox up"
        ) from None
    except (OSError, ValidationError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if state.format != _FORMAT:
        raise UsageError(f"{path} has format {state.format}, this hpctrain knows {_FORMAT}")
    return state


def write_state(paths: SandboxPaths, state: SandboxState) -> None:
    """Replace the file atomically."""
    text = _adapter().dump_json(state, indent=2).decode()
    replace_text(state_file(paths.directory), text + "\n", mode=0o600, durable=False)


@cache
def _adapter() -> TypeAdapter[SandboxState]:
    # Building it takes some 30 ms, and status or repair read the file again and again.
    return TypeAdapter(SandboxState)
