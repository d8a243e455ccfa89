"""Makes the settings of a service's router and controller from its spec, profile and plan.

Belongs here: which value comes from where, and what of the router can never work. Does not belong
here: what follows from the settings (`hpctrain.serving.router`).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.plan.serving.documents import ServicePlan
from hpctrain.serving.router.gate_settings import Tokens, tls_context
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.network import port_range
from hpctrain.spec.service import RouterSpec, ServiceSpec
from hpctrain.store.service_settings import RouterSettings, ScalingSettings, ServiceSettings

# One process of the gate passes some thousand pieces of answers per second on; vllm-router needs
# about as much for itself.
_CPUS_PER_GATE = 2
_MOST_GATES = 8


def service_settings(
    spec: ServiceSpec, profile: ClusterProfile, plan: ServicePlan, service_id: str
) -> ServiceSettings:
    """Make the settings of a service."""
    return ServiceSettings(
        service_id=service_id,
        engine=plan.replica.engine,
        router=_router_settings(spec, profile),
        scaling=_scaling_settings(spec, plan),
        load_seconds=plan.load_seconds,
        drain_seconds=plan.drain_seconds,
        poll_seconds=float(profile.limits.poll),
    )


def _router_settings(spec: ServiceSpec, profile: ClusterProfile) -> RouterSettings:
    router, ports = spec.router, profile.metrics.ports
    gates = max(1, min(router.cpus // _CPUS_PER_GATE, _MOST_GATES))
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
        processes=gates if router.name == "vllm-router" else router.cpus,
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


def require_router_files(router: RouterSpec, profile: ClusterProfile) -> None:
    """Check the files and the port of a router before anything is submitted.

    Raises InvalidInputError with what clients would find out later.
    """
    problems = []
    ports = profile.metrics.ports
    if router.port is not None and ports is not None:
        first, last = port_range(ports)
        if not first <= router.port <= last:
            words = f"router.port {router.port} is outside of {ports}, which this site allows"
            problems.append(Problem(words))
    secrets = [router.token_file, router.tls.key if router.tls is not None else None]
    for path in filter(None, secrets):
        problems += _open_to_others(Path(path).expanduser())
    if problems:
        raise InvalidInputError(problems)
    if router.token_file is not None:
        Tokens(Path(router.token_file).expanduser())
    if router.tls is not None:
        tls_context(Path(router.tls.certificate).expanduser(), Path(router.tls.key).expanduser())


def _open_to_others(path: Path) -> list[Problem]:
    """Whether a secret can be read by other users; a missing file is told elsewhere."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return []
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        return [Problem("every user of this machine can read it", str(path), hint="chmod 600")]
    return []
