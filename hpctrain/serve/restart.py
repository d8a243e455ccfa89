"""Records that a person wants all replicas of a service restarted, one after the other.

Belongs here: the request, and whether it makes sense. Does not belong here: the restart itself
(`hpctrain.serve.router.decide`).
"""

from __future__ import annotations

from hpctrain.base import clock
from hpctrain.base.errors import UsageError
from hpctrain.records.requests import printable_reason, user_name
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import (
    RestartRequest,
    ServiceEventKind,
    ServiceLedger,
    ServiceState,
    read_service_settings,
)
from hpctrain.serve.scale import refuse_ending


def request_restart(
    service: ServiceLayout, reason: str = "", *, compare: bool = True
) -> RestartRequest:
    """Ask for a rolling restart: one replica more, then the old ones leave one by one.

    With `compare` new replicas have to answer as the old ones do. Raises UsageError while another
    restart is under way, or where there is no room for one replica more; StorageError where the
    service cannot be read, PermissionError for a user who may not write into `control/`.
    """
    settings = read_service_settings(service.settings)
    refuse_ending(service)
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
