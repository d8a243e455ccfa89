"""What a person asks of a running service: another number of replicas, a restart, its end.

The controller in the router's job follows within seconds. Without one, and with `now`, a service
is ended from here. Belongs here: the requests, whether they make sense, and ending jobs without a
controller. Does not belong here: starting and draining replicas (`hpctrain.serve.router`), how a
replica leaves (`hpctrain.serve.replica.drain`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.base.durable import replace_text
from hpctrain.base.errors import SlurmUnreachableError, UsageError
from hpctrain.job.job_queries import find_jobs
from hpctrain.records.find import RunFiles
from hpctrain.records.requests import printable_reason, user_name
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import (
    RestartRequest,
    ScaleRequest,
    ServiceEventKind,
    ServiceLedger,
    ServiceState,
    read_service_settings,
)
from hpctrain.runs.control import cancel
from hpctrain.serve.replicas import drain_replica
from hpctrain.serve.start_router import runs_here
from hpctrain.slurm.client import SlurmClient


def request_scale(service: ServiceLayout, replicas: int | None) -> ScaleRequest:
    """Ask for a number of replicas; None gives the decision back to the spec.

    Raises UsageError for a number that the service may not have, StorageError where it cannot be
    read, PermissionError for a user who may not write into `control/`.
    """
    settings = read_service_settings(service.settings)
    if replicas is not None and replicas < 0:
        raise UsageError(f"{replicas} is no number of replicas")
    most = settings.scaling.most_jobs
    if replicas is not None and most is not None and replicas > most:
        raise UsageError(
            f"`resources.max_gpus` of service `{service.service_id}` allows {most} replicas",
            hint="change it in the spec and `hpctrain serve up` again",
        )
    _refuse_ending(service)
    request = ScaleRequest(replicas=replicas, user=user_name(), time=clock.now())
    ServiceLedger(service.ledger).append(
        ServiceEventKind.SCALE_REQUESTED, replicas=replicas, user=request.user
    )
    write_record(service.scale_request, request)
    return request


def request_restart(
    service: ServiceLayout, reason: str = "", *, compare: bool = True
) -> RestartRequest:
    """Ask for a rolling restart: one replica more, then the old ones leave one by one.

    With `compare` new replicas have to answer as the old ones do. Raises UsageError while another
    restart is under way, or where there is no room for one replica more; StorageError where the
    service cannot be read, PermissionError for a user who may not write into `control/`.
    """
    settings = read_service_settings(service.settings)
    _refuse_ending(service)
    if service.restart_request.exists():
        state = read_record(service.state, ServiceState)
        words = state.restart if state is not None and state.restart else "not begun yet"
        raise UsageError(f"service `{service.service_id}` is being restarted: {words}")
    most = settings.scaling.most_jobs
    if most is not None and settings.scaling.count >= most:
        raise UsageError(
            f"a rolling restart needs one replica more, and `resources.max_gpus` allows {most}",
            hint=f"`hpctrain serve scale {service.service_id} {most - 1}` first",
        )
    request = RestartRequest(
        user=user_name(), time=clock.now(), reason=printable_reason(reason), compare=compare
    )
    ServiceLedger(service.ledger).append(
        ServiceEventKind.RESTART_REQUESTED, user=request.user, reason=request.reason or None
    )
    write_record(service.restart_request, request)
    return request


def _refuse_ending(service: ServiceLayout) -> None:
    """Raise UsageError for a service that was asked to end."""
    if service.down_request.exists():
        raise UsageError(
            f"service `{service.service_id}` is to end (`hpctrain serve down`)",
            hint="`hpctrain serve up` starts it again",
        )


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
    parts = [RunFiles(run) for run in (*routers, *replicas.values()) if run.ledger.exists()]
    found = find_jobs(parts, slurm)
    if not all(jobs.answered for jobs in found.values()):
        raise SlurmUnreachableError(f"Slurm does not say which jobs {service.service_id} has")
    live = {run.run_id: run for run in parts if found[run.run_id].live}
    if now:
        cancelled: list[int] = []
        # The router's job first: it would start replicas anew.
        for run in sorted(live.values(), key=lambda run: run.layout.replica_config.exists()):
            with contextlib.suppress(UsageError):  # it has ended in the meantime
                cancelled += cancel(run, slurm).job_ids
        return EndingService(service.service_id, controller=False, cancelled=tuple(cancelled))
    if any(run.run_id in live for run in routers) or runs_here(service):
        return EndingService(service.service_id, controller=True)
    leaving = [name for name, run in replicas.items() if run.run_id in live]
    for name in leaving:
        drain_replica(service, name, slurm, "the service ends")
    return EndingService(service.service_id, controller=False, drained=tuple(map(str, leaving)))
