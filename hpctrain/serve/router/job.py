"""The router's job from its first word to its last: router, rotation and controller together.

The same three parts run in a Slurm job under the supervisor and on a login node. Belongs here:
their order and what ends them. Does not belong here: records of a task (`__main__`), the parts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import (
    Address,
    Rotation,
    ServiceEventKind,
    ServiceLedger,
    ServiceSettings,
)
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.jobs import SlurmReplicaJobs
from hpctrain.serve.replica.life import say
from hpctrain.serve.router.controller import Controller, claimant_of
from hpctrain.serve.router.haproxy import Haproxy, find_haproxy_before_router
from hpctrain.serve.router.programs import Place, RouterProgram, find_program
from hpctrain.serve.router.rotation import RotationLoop
from hpctrain.serve.router.traffic import Engines, TrafficWatch
from hpctrain.serve.router.vllm_router import VllmRouter

POLL_SECONDS = 0.5
# A router program that ends is started anew in place so often within the window.
_MOST_RESTARTS, _RESTART_WINDOW_SECONDS = 5, 600.0
# A loop over endpoints that has made no pass for so long hangs.
_HUNG_SECONDS = 120.0
# Clients that keep an address for so long without asking have to read the address file again.
_QUIET_SECONDS = 60.0
# How long the router may take to be told of the replicas that answer already.
_SETTLE_SECONDS = 15.0
_EVERYWHERE = ("0.0.0.0", "::", "")


class RouterFailedError(HpctrainError):
    """The router's job cannot go on; another launch may."""

    exit_code = 1


class RouterJob:
    """Router, rotation and controller of one service, from `start` to `leave`."""

    def __init__(
        self,
        service: ServiceLayout,
        settings: ServiceSettings,
        place: Place,
        jobs: SlurmReplicaJobs,
    ) -> None:
        self._service, self._settings = service, settings
        self._place, self._jobs = place, jobs
        self._directory = Path(tempfile.mkdtemp(prefix="hpctrain-router-"))
        self._router = self._found()
        self._rotation: RotationLoop | None = None
        self._controller: Controller | None = None
        self._restarts: list[float] = []
        self._epoch = 0
        self._last_requests, self._busy_at = 0, clock.monotonic()
        self._engines: Engines | None = None

    def start(self) -> None:
        """Begin to listen, and to steer the service. Raises HpctrainError, OSError."""
        self._router.start()
        service = self._service
        engine = next(one for one in SERVING_ENGINES.values() if one.name == self._settings.engine)
        claimant = claimant_of(
            None if self._place.job_id is None else str(self._place.job_id),
            self._place.node,
            service.directory,
        )
        self._epoch = claim_epoch(service.epochs, claimant)
        self._engines = Engines(engine.metrics)
        traffic = TrafficWatch(service, self._router, self._engines)
        self._rotation = RotationLoop(
            service, self._router, self._epoch, self._is_newest, engine.ready_path
        )
        self._controller = Controller(
            service,
            self._settings,
            self._jobs,
            traffic,
            lambda: self._rotation.asked if self._rotation is not None else {},
            self._epoch,
            claimant,
        )
        self._rotation.start()
        # Clients that find the address at once are not to be told that there is no replica.
        self._rotation.await_settled(_SETTLE_SECONDS)
        self._write_address()
        self._controller.start()

    def look(self) -> None:
        """Start what has ended anew, and have replaced secrets taken up.

        Raises RouterFailedError when what has ended was started anew too often.
        """
        problem = self._router.problem()
        if problem is not None:
            now = clock.monotonic()
            recent = [at for at in self._restarts if now - at < _RESTART_WINDOW_SECONDS]
            if len(recent) >= _MOST_RESTARTS:
                raise RouterFailedError(f"the router ended {len(recent) + 1} times: {problem}")
            self._restarts = [*recent, now]
            self._router.restart()
        self._router.refresh()
        rotation = self._rotation
        if rotation is not None and clock.monotonic() - rotation.passed_at > _HUNG_SECONDS:
            raise RouterFailedError(f"no look at endpoints for {_HUNG_SECONDS:.0f} s")

    @property
    def is_superseded(self) -> bool:
        """Whether another router steers the service now."""
        return self._controller is not None and self._controller.superseded

    def is_quiet(self) -> bool:
        """Whether no client has asked for a while, so that all have found the other router."""
        counts, now = self._router.counts(), clock.monotonic()
        if counts.in_flight or counts.requests != self._last_requests:
            self._last_requests, self._busy_at = counts.requests, now
        return now - self._busy_at > _QUIET_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether the service was asked to end and no replica is left."""
        return self._controller is not None and self._controller.is_over

    def leave(self, seconds: float) -> None:
        """Steer no longer, take no more requests, and let those that have begun end."""
        if self._controller is not None:
            self._controller.stop()
        with contextlib.suppress(OSError):
            standing = read_record(self._service.address, Address)
            if standing is not None and standing.epoch == self._epoch:  # not a newer router's
                self._service.address.unlink(missing_ok=True)
        self._router.stop(seconds)
        if self._rotation is not None:
            self._rotation.stop()
            with contextlib.suppress(OSError):
                # Replicas that drain need not wait for a router that asks nobody any more.
                if self._is_newest():
                    nobody = Rotation(epoch=self._epoch, time=clock.now())
                    write_record(self._service.rotation, nobody)
        if self._engines is not None:
            self._engines.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _is_newest(self) -> bool:
        return self._controller is None or not self._controller.superseded

    def _found(self) -> RouterProgram:
        """Choose and find the router's program. Raises InvalidInputError."""
        router, front = self._settings.router, None
        program = find_program(router.name, router.program, router.python)
        before = program if router.name == "haproxy" else find_haproxy_before_router(router)
        if before is not None:
            front = Haproxy(before, self._settings, self._place, self._directory)
            if router.name == "haproxy":
                return front
        else:
            say("no HAProxy here: clients reach vllm-router itself, with its commands")
        return VllmRouter(program, self._settings, self._place, front)

    def _write_address(self) -> None:
        router, place = self._settings.router, self._place
        host = router.address or place.host
        host = place.node if host in _EVERYWHERE else host
        host = f"[{host}]" if ":" in host else host
        scheme = "https" if router.certificate is not None else "http"
        address = Address(
            epoch=self._epoch,
            job_id=place.job_id,
            node=place.node,
            url=f"{scheme}://{host}:{self._router.port}",
            needs_token=router.token_file is not None,
            time=clock.now(),
        )
        write_record(self._service.address, address)
        ServiceLedger(self._service.ledger).append(
            ServiceEventKind.ADDRESS,
            epoch=self._epoch,
            url=address.url,
            node=place.node,
            job_id=place.job_id,
        )


def place_of(environment: Mapping[str, str], logs: Path) -> Place:
    """Where this process runs: the node of a job as the launcher names it, or this host."""
    node = environment.get("SLURMD_NODENAME") or socket.gethostname()
    job_id = environment.get("SLURM_JOB_ID", "")
    return Place(
        node=node,
        host=environment.get("MASTER_ADDR") or node,
        job_id=int(job_id) if job_id.isdigit() else None,
        logs=logs,
        environment=dict(os.environ),
    )
