"""Reads the records of a service, whose directory lies beside run directories.

Belongs here: records as they are, and whether a name means a service. Does not belong here: finding
directories (`hpctrain.records.find`), Slurm, what follows from the records (`replica_lives`,
`service_metrics`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.records.find import RunFiles, all_runs, all_services
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import (
    Address,
    Endpoint,
    Rotation,
    ServiceLedger,
    ServiceState,
)

if TYPE_CHECKING:
    from hpctrain.serve.plan.documents import ServicePlan

_OVER = ("ended", "failed")


@dataclass(frozen=True)
class ServiceFiles:
    """One service directory. Records that are missing or torn are None; newer ones raise
    NewerFormatError."""

    layout: ServiceLayout

    @property
    def service_id(self) -> str:
        return self.layout.service_id

    @property
    def owner_name(self) -> str | None:
        """The user whose jobs the service has; None where that cannot be found out."""
        return RunFiles(RunLayout(self.layout.directory)).owner_name

    @property
    def ledger(self) -> ServiceLedger:
        return ServiceLedger(self.layout.ledger)

    @property
    def state(self) -> ServiceState | None:
        return read_record(self.layout.state, ServiceState)

    @property
    def rotation(self) -> Rotation | None:
        return read_record(self.layout.rotation, Rotation)

    @property
    def address(self) -> Address | None:
        return read_record(self.layout.address, Address)

    def endpoints(self, now: float) -> dict[ReplicaName, Endpoint]:
        """Read the endpoints whose leases have not ended, by replica. Raises OSError."""
        found = {}
        for path in sorted(self.layout.endpoints.glob("*.json")):
            name = ReplicaName.parse(path.stem)
            endpoint = read_record(path, Endpoint) if name is not None else None
            if name is not None and endpoint is not None and endpoint.lease_until > now:
                found[name] = endpoint
        return found

    def plan(self) -> ServicePlan | None:
        """Read the plan; None where it cannot be read."""
        from hpctrain.serve.plan.documents import ServicePlan

        with contextlib.suppress(OSError, ValueError):
            return ServicePlan.model_validate_json(self.layout.plan.read_bytes())
        return None

    @property
    def asked_down(self) -> bool:
        return self.layout.down_request.exists()

    def is_over(self, state: ServiceState | None) -> bool:
        """Tell whether somebody has ended the service and none of its replicas is left."""
        left = state is None or any(one.phase not in _OVER for one in state.replicas)
        return self.asked_down and not left


def is_meant_as_service(runs: Path, name: str) -> bool:
    """Tell whether a name is that of a service, or the start of one and of no run."""
    ids = [layout.service_id for layout in all_services(runs)]
    if name in ids:
        return True
    return any(name and one.startswith(name) for one in ids) and not any(
        run.run_id.startswith(name) for run in all_runs(runs)
    )
