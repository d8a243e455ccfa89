"""Makes what the run directory of every replica of a service consists of, once, at `serve up`.

A replica is started months later, by the controller inside the router's job, without planner,
templates and profile. So its documents are written once for a replica of the name
`records.service_layout.PROTOTYPE`, and starting one means putting another name in
(`serve_replicas`). Belongs here: which documents, and where their values come from. Does not
belong here: the service directory itself (`serve_up`), Slurm.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpctrain.base.durable import make_private_directory, replace_text
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.job.kept_code import keep_code
from hpctrain.job.supervisor_settings import mttf_seconds
from hpctrain.plan.documents import NodeRequest
from hpctrain.plan.job import Job, ServicePart, ServingProgram
from hpctrain.records.service_layout import PROTOTYPE, ServiceLayout
from hpctrain.serve.engines.contract import CpuEngine, EngineStart, LoraAdapter
from hpctrain.serve.engines.registry import refusals_of
from hpctrain.serve.plan.leaving import leave_times, term_seconds
from hpctrain.serve.replica.config import ReplicaConfig
from hpctrain.serve.service_job import (
    ServiceInputs,
    ServiceJobDocuments,
    service_job_documents,
    service_supervision,
)
from hpctrain.serve.service_tasks import replica_task
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import port_range
from hpctrain.spec.service import ServiceSpec

# How long loading may take, as a multiple of what is expected, and at least.
_LOAD_FACTOR, _LEAST_LOAD_SECONDS = 3.0, 900.0


def replica_documents(
    service: ServiceLayout, inputs: ServiceInputs
) -> ServiceJobDocuments[ReplicaConfig]:
    """Make the documents of all replicas.

    Raises InvalidInputError for what sbatch or the engine cannot take.
    """
    part = replica_part(inputs)
    job = Job(part, inputs.silent_profile, part)
    config = _replica_config(service, inputs, term_seconds(job.profile, job.partition))
    refused = refusals_of(config.engine, config.start)
    if refused:
        raise InvalidInputError([inputs.spec.problem("engine", line) for line in refused])
    return service_job_documents(
        service,
        inputs,
        "replica",
        service.replica(PROTOTYPE).run_id,
        job,
        replica_task(job, inputs.plan.replica, leave_times(inputs.spec.document.drain)),
        config,
        read=(str(inputs.weights),),
        mttf_seconds=mttf_seconds(job),
    )


def write_prototype(service: ServiceLayout, documents: ServiceJobDocuments[ReplicaConfig]) -> None:
    """Write the documents, and the code that replicas run. Raises OSError."""
    prototype = service.prototype
    make_private_directory(prototype.directory)
    for path, text in documents.texts(prototype).items():
        replace_text(path, text, mode=0o600)
    keep_code(prototype)


def replica_part(inputs: ServiceInputs) -> ServicePart:
    """Describe the job of one replica."""
    spec, replica = inputs.spec.document, inputs.plan.replica
    return ServicePart(
        name=spec.name,
        engine=ServingProgram(replica.engine),
        resources=spec.resources.of_replica(replica.gpus),
        environment=spec.environment,
        nodes=NodeRequest(nodes=replica.nodes, gpus_per_node=replica.gpus // replica.nodes),
        supervise=service_supervision(_load_limit_seconds(inputs)),
    )


def _replica_config(
    service: ServiceLayout, inputs: ServiceInputs, term_seconds: float
) -> ReplicaConfig:
    spec, profile, plan = inputs.spec.document, inputs.profile.document, inputs.plan
    address = profile.metrics.address
    return ReplicaConfig(
        service=str(service.directory),
        name=str(PROTOTYPE),
        engine=plan.replica.engine,
        start=_engine_start(inputs),
        nodes=plan.replica.nodes,
        url_host=address,
        ports=port_range(profile.metrics.ports) if profile.metrics.ports else None,
        stage_directory=_stage_directory(spec, profile, inputs.weights),
        load_limit_seconds=_load_limit_seconds(inputs),
        notice_seconds=float(spec.drain.notice),
        drain_seconds=float(spec.drain.longest),
        term_seconds=term_seconds,
    )


def _load_limit_seconds(inputs: ServiceInputs) -> float:
    own, planned = inputs.spec.document.load_time, inputs.plan.load_seconds
    return max(_LEAST_LOAD_SECONDS, _LOAD_FACTOR * float(planned if own is None else own))


def _engine_start(inputs: ServiceInputs) -> EngineStart:
    spec, profile, plan = inputs.spec.document, inputs.profile.document, inputs.plan.replica
    return EngineStart(
        python=spec.engine.python or profile.software.python or inputs.python,
        model_path=str(inputs.weights),
        served_name=spec.served_name,
        host=profile.metrics.address or "0.0.0.0",
        port=0,
        tensor_parallel=plan.tp,
        pipeline_parallel=plan.pp,
        precision=plan.precision,
        quantized_checkpoint=_is_quantized(inputs.weights),
        kv_precision=plan.kv_precision,
        max_model_tokens=plan.max_length,
        max_sequences=plan.max_sequences,
        max_batched_tokens=plan.batch_tokens,
        memory_fraction=spec.engine.memory_fraction,
        adapters=tuple(_adapter(name, path) for name, path in spec.weights.adapters.items()),
        drain_seconds=round(float(spec.drain.longest)),
        extra_arguments=tuple(spec.engine.arguments),
        cpu=CpuEngine() if profile.gpu.emulated else None,
    )


def _stage_directory(spec: ServiceSpec, profile: ClusterProfile, weights: Path) -> str | None:
    """Choose where the weights are copied to on each node; None: they are read where they are."""
    local = [system.path for system in profile.filesystems if system.kind == "local"]
    if not spec.weights.stage or any(weights.is_relative_to(path) for path in local):
        return None
    return profile.software.scratch or next(iter(local), None)


def _is_quantized(weights: Path) -> bool:
    """Whether config.json says so; a run's checkpoint has none, and is never quantized.

    Raises InvalidInputError if it cannot be read.
    """
    path = weights / "config.json"
    return path.exists() and bool(_json(path).get("quantization_config"))


def _adapter(name: str, path: str) -> LoraAdapter:
    """Describe an adapter by its own settings. Raises InvalidInputError if there are none."""
    rank = _json(Path(path) / "adapter_config.json").get("r")
    if not isinstance(rank, int):
        raise InvalidInputError([Problem(f"adapter `{name}` names no rank (`r`)", path)])
    return LoraAdapter(name, os.path.abspath(path), rank)


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInputError([Problem(f"cannot be read: {error.strerror}", str(path))]) from None
    except ValueError as error:
        raise InvalidInputError([Problem(f"is no JSON: {error}", str(path))]) from None
    return found if isinstance(found, dict) else {}
