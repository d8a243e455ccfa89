"""Publish a replica in the service directory, for as long as it renews its lease.

Belongs here: the endpoint's file, the fence, and whether the router still names the replica. Does
not belong here: when it is published and withdrawn (`lifecycle`, `drain`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.base.errors import StorageError
from hpctrain.records.epochs import current_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import Endpoint, Rotation
from hpctrain.serve.replica.failures import SupersededError


@dataclass
class Lease:
    """The endpoint of one launch of a replica; `endpoint` is what stands in its file."""

    service: ServiceLayout
    run: RunLayout
    endpoint: Endpoint
    lease_seconds: float

    @property
    def _path_name(self) -> ReplicaName:
        name = ReplicaName.parse(self.endpoint.replica)
        assert name is not None, "the settings were written with a replica's name"
        return name

    def renew(self) -> None:
        """Move the lease on; the first call publishes the replica.

        A directory that is away costs the lease, not the replica: it is renewed when it is back.
        Raises SupersededError if a newer launch owns the replica.
        """
        self.check_fence()
        until = clock.now() + self.lease_seconds
        self.endpoint = self.endpoint.model_copy(update={"lease_until": until})
        path = self.service.endpoint(self._path_name)
        with contextlib.suppress(OSError):
            write_record(path, self.endpoint, durable=False)

    def check_fence(self) -> None:
        """Raise SupersededError if a newer launch owns the replica."""
        with contextlib.suppress(OSError, StorageError):
            newest = current_epoch(self.run.epochs)
            if newest > self.endpoint.epoch:
                raise SupersededError(
                    f"launch {newest} of this replica has taken over from {self.endpoint.epoch}"
                )

    def withdraw(self) -> None:
        """Remove the endpoint, unless a newer launch has written it."""
        path = self.service.endpoint(self._path_name)
        standing = read_record(path, Endpoint)
        if standing is not None and standing.epoch > self.endpoint.epoch:
            return
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def is_out_of_rotation(self, withdrawn_at: float) -> bool:
        """Whether the router has seen that the replica is withdrawn, and asks it no more.

        False without a router, which nobody can tell from one that is away.
        """
        rotation = read_record(self.service.rotation, Rotation)
        if rotation is None or rotation.time < withdrawn_at:
            return False
        return self.endpoint.replica not in rotation.replicas
