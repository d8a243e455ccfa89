"""Ends a service: its replicas leave in order, and then its router.

The controller does it while there is one. Without one, and with `now`, it is done from here.
Belongs here: the request, and ending jobs without a controller. Does not belong here: how a replica
leaves (`hpctrain.serve.replica.drain`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import SlurmUnreachableError, UsageError
from hpctrain.job.job_queries import find_jobs
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.requests import user_name
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import ServiceEventKind, ServiceLedger
from hpctrain.runs.control import cancel
from hpctrain.serve.replicas import drain_replica
from hpctrain.serve.router_on_login_node import runs_here
from hpctrain.slurm.client import SlurmClient


@dataclass(frozen=True)
class EndingService:
    """What ends a service. `controller`: there is one, which drains all replicas and then leaves.

    Else `drained` replicas were asked to leave from here, or with `now` their jobs `cancelled`.
    """

    service_id: str
    controller: bool
    drained: tuple[str, ...] = ()
    cancelled: tuple[int, ...] = ()


def stop_service(service: ServiceLayout, slurm: SlurmClient, *, now: bool = False) -> EndingService:
    """Ask a service to end; `now`: its jobs are cancelled, and requests broken off.

    A job that is cancelled drains, too, as far as Slurm's KillWait allows it. Raises UsageError for
    a directory that is no service, SlurmUnreachableError, SlurmRefusedError.
    """
    if not service.settings.exists():
        raise UsageError(f"{service.directory} is no service")
    ServiceLedger(service.ledger).append(
        ServiceEventKind.DOWN_REQUESTED, user=user_name(), reason="now" if now else None
    )
    replace_text(service.down_request, f"{user_name()}\n", mode=0o600)
    routers = [service.router_generation(number) for number in service.router_generations()]
    replicas = {name: service.replica(name) for name in service.replica_names()}
    live = _live(service, [*routers, *replicas.values()], slurm)
    if now:
        return EndingService(service.service_id, controller=False, cancelled=_cancel(live, slurm))
    if any(run.run_id in live for run in routers) or runs_here(service):
        return EndingService(service.service_id, controller=True)
    leaving = [name for name, run in replicas.items() if run.run_id in live]
    for name in leaving:
        drain_replica(service, name, slurm, "the service ends")
    return EndingService(service.service_id, controller=False, drained=tuple(map(str, leaving)))


def _live(service: ServiceLayout, runs: list[RunLayout], slurm: SlurmClient) -> dict[str, RunFiles]:
    """The parts of a service that have a job. Raises SlurmUnreachableError."""
    files = [RunFiles(run) for run in runs if run.ledger.exists()]
    found = find_jobs(files, slurm)
    if not all(jobs.answered for jobs in found.values()):
        raise SlurmUnreachableError(f"Slurm does not say which jobs {service.service_id} has")
    return {run.run_id: run for run in files if found[run.run_id].live}


def _cancel(live: dict[str, RunFiles], slurm: SlurmClient) -> tuple[int, ...]:
    """Cancel all jobs, the router's first: it would start replicas anew."""
    routers_first = sorted(live.values(), key=lambda run: run.layout.replica_config.exists())
    cancelled: list[int] = []
    for run in routers_first:
        with contextlib.suppress(UsageError):  # it has ended in the meantime
            cancelled += cancel(run, slurm).job_ids
    return tuple(cancelled)
