"""Makes the settings of a service's router and controller from its spec, profile and plan.

Belongs here: which value comes from where, and what of the router can never work. Does not belong
here: what follows from the settings (`hpctrain.serve.router`).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.service_records import RouterSettings, ScalingSettings, ServiceSettings
from hpctrain.serve.plan.documents import ServicePlan
from hpctrain.serve.router.haproxy import (
    find_haproxy_before_router,
    require_certificate,
    token_digests,
)
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.network import port_range
from hpctrain.spec.service import ServiceSpec

# HAProxy takes no more threads (Configuration Manual, 3.1: nbthread).
_MOST_THREADS = 64


def service_settings(
    spec: ServiceSpec, profile: ClusterProfile, plan: ServicePlan, service_id: str
) -> ServiceSettings:
    """Make the settings of a service."""
    return ServiceSettings(
        service_id=service_id,
        engine=plan.replica.engine,
        router=router_settings(spec, profile),
        scaling=_scaling_settings(spec, plan),
        load_seconds=plan.load_seconds,
        drain_seconds=plan.drain_seconds,
        poll_seconds=float(profile.limits.poll),
    )


def router_settings(spec: ServiceSpec, profile: ClusterProfile) -> RouterSettings:
    """Make the settings of a service's router; vllm-router has half of the processors itself."""
    router, ports = spec.router, profile.metrics.ports
    threads = router.cpus if router.name == "haproxy" else max(1, router.cpus // 2)
    tls = router.tls
    return RouterSettings(
        name=router.name,
        program=router.program,
        python=spec.engine.python or profile.software.python,
        policy=router.policy,
        place=router.place,
        port=router.port,
        ports=port_range(ports) if ports is not None else None,
        address=router.address or profile.metrics.address,
        certificate=_absolute(tls.certificate if tls is not None else None),
        key=_absolute(tls.key if tls is not None else None),
        token_file=_absolute(router.token_file),
        rate_limit=router.rate_limit,
        retries=router.retries,
        processes=min(threads, _MOST_THREADS),
    )


def _scaling_settings(spec: ServiceSpec, plan: ServicePlan) -> ScalingSettings:
    replicas, most_gpus = spec.replicas, spec.resources.max_gpus
    most = max(replicas.max if replicas.max is not None else plan.count, replicas.min)
    return ScalingSettings(
        count=min(plan.count, most),
        spare=min(plan.spare, max(0, most - 1)),
        least=replicas.min,
        most=most,
        capacity_rate=plan.capacity_rate / max(1, plan.replicas),
        hours=tuple(sorted((_minute(of_day), share) for of_day, share in replicas.hours.items())),
        time_zone=replicas.time_zone,
        react=replicas.react,
        idle_seconds=float(replicas.idle) if replicas.idle is not None else None,
        most_jobs=None if most_gpus is None else most_gpus // plan.replica.gpus,
    )


def _minute(of_day: str) -> int:
    hour, _, minute = of_day.partition(":")
    return 60 * int(hour) + int(minute)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def require_router_files(router: RouterSettings) -> None:
    """Check the files, the port and the HAProxy of a router before anything is submitted.

    Raises InvalidInputError with what clients would find out later.
    """
    problems = []
    if router.port is not None and router.ports is not None:
        first, last = router.ports
        if not first <= router.port <= last:
            ports = f"{first}-{last}, which this site allows"
            problems.append(Problem(f"router.port {router.port} is outside of {ports}"))
    for path in filter(None, [router.token_file, router.key]):
        problems += _open_to_others(Path(path))
    if problems:
        raise InvalidInputError(problems)
    if router.token_file is not None:
        token_digests(Path(router.token_file))
    if router.certificate is not None and router.key is not None:
        require_certificate(Path(router.certificate), Path(router.key))
    if router.name == "vllm-router" and "$" not in (router.python or ""):
        find_haproxy_before_router(router)


def _open_to_others(path: Path) -> list[Problem]:
    """Whether a secret can be read by other users; a missing file is told elsewhere."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return []
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        return [Problem("every user of this machine can read it", str(path), hint="chmod 600")]
    return []
