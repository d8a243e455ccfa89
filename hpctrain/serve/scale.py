"""Records how many replicas of a service a person wants; the controller follows within seconds.

Belongs here: the request, and whether it makes sense. Does not belong here: starting and draining
replicas (`hpctrain.serve.router`).
"""

from __future__ import annotations

from hpctrain.base import clock
from hpctrain.base.errors import UsageError
from hpctrain.records.requests import user_name
from hpctrain.records.run_records import write_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import (
    ScaleRequest,
    ServiceEventKind,
    ServiceLedger,
    read_service_settings,
)


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
    refuse_ending(service)
    request = ScaleRequest(replicas=replicas, user=user_name(), time=clock.now())
    ServiceLedger(service.ledger).append(
        ServiceEventKind.SCALE_REQUESTED, replicas=replicas, user=request.user
    )
    write_record(service.scale_request, request)
    return request


def refuse_ending(service: ServiceLayout) -> None:
    """Raise UsageError for a service that was asked to end."""
    if service.down_request.exists():
        raise UsageError(
            f"service `{service.service_id}` is to end (`hpctrain serve down`)",
            hint="`hpctrain serve up` starts it again",
        )
