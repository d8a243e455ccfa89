"""Make the documents of a service's jobs: those of all replicas, and the router's.

Software, limits, environment and container of these jobs are those of a run, from the same
template. A replica is started months later, by the controller inside the router's job, without
planner, templates and profile. So its documents are written once, at `serve up`, for a replica of
the name `records.service_layout.PROTOTYPE`, and starting one means putting another name in
(`replicas`). Belongs here: which documents, and where their values come from. Does not belong
here: submitting jobs (`replicas`, `start_router`), the engine's own command line
(`hpctrain.serve.engines`), what follows from the settings (`hpctrain.serve.router`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from hpctrain.base.durable import make_private_directory, replace_text
from hpctrain.base.errors import InvalidInputError, Problem, UsageError
from hpctrain.base.printable_text import printable_line
from hpctrain.base.units import Duration, short_duration
from hpctrain.job.kept_code import keep_code
from hpctrain.job.prepare import JobDocuments, setup_file, site_templates, templates_digest
from hpctrain.job.render.environment import prologue_text
from hpctrain.job.render.job_options import continuation_clause, continuation_sentence
from hpctrain.job.render.script import (
    JobTask,
    ScriptFacts,
    ServiceWords,
    SrunTasks,
    job_script,
    render_service_script,
)
from hpctrain.job.supervisor_settings import mttf_seconds, supervise_config
from hpctrain.judge.catalogue import load_signatures
from hpctrain.plan.documents import NodeRequest
from hpctrain.plan.job import Job, ServicePart, ServingProgram
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import run_comment
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.service_layout import PROTOTYPE, ServiceLayout
from hpctrain.records.service_records import RouterSettings, ScalingSettings, ServiceSettings
from hpctrain.records.supervise_config import LaunchShape
from hpctrain.serve.engines.contract import CpuEngine, EngineStart, LoraAdapter
from hpctrain.serve.engines.registry import refusals_of
from hpctrain.serve.plan.documents import ServicePlan
from hpctrain.serve.plan.leaving import leave_times, term_seconds
from hpctrain.serve.replica.config import ReplicaConfig, RouterJobSettings
from hpctrain.spec.loader import Loaded, profile_search_path
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import port_range
from hpctrain.spec.run import ResourcesSpec
from hpctrain.spec.service import ServiceSpec
from hpctrain.spec.supervision import SuperviseSpec

# Signs of life come every second; a busy file system may hold some up.
_STALL = Duration(180)
# A launch that has answered requests for so long counts as progress: budgets begin anew.
_PROGRESS_SECONDS = 600.0
# How long loading a replica may take, as a multiple of what is expected, and at least.
_LOAD_FACTOR, _LEAST_LOAD_SECONDS = 3.0, 900.0
_ROUTER_SETUP_SECONDS = 600.0
# HAProxy takes no more threads (Configuration Manual, 3.1: nbthread).
_MOST_THREADS = 64


@dataclass(frozen=True)
class ServiceInputs:
    """What a service is made of. `weights`: the Hugging Face directory that is served.

    The profile is the one for jobs in the spec's partition.
    """

    spec: Loaded[ServiceSpec]
    profile: Loaded[ClusterProfile]
    plan: ServicePlan
    weights: Path
    python: str = sys.executable

    @property
    def silent_profile(self) -> ClusterProfile:
        """The profile without its channels: the controller tells people about its jobs."""
        return self.profile.document.model_copy(update={"notify": None})

    @property
    def load_limit_seconds(self) -> float:
        """How long the engine of a replica may take to answer."""
        own, planned = self.spec.document.load_time, self.plan.load_seconds
        return max(_LEAST_LOAD_SECONDS, _LOAD_FACTOR * float(planned if own is None else own))


@dataclass(frozen=True)
class ServiceJobDocuments(JobDocuments):
    """The documents of a job of a service; `own` are the settings of the program that it runs."""

    own: BaseModel

    def texts(self, run: RunLayout) -> Mapping[Path, str]:
        """The files of a run directory with these documents."""
        own_path = run.directory / self.supervise.shapes[0].train_config
        return {**super().texts(run), own_path: self.own.model_dump_json(indent=1)}


def replica_documents(service: ServiceLayout, inputs: ServiceInputs) -> ServiceJobDocuments:
    """Make the documents of all replicas.

    Raises InvalidInputError for what sbatch or the engine cannot take.
    """
    spec, profile = inputs.spec.document, inputs.profile.document
    replica = inputs.plan.replica
    part = ServicePart(
        name=spec.name,
        engine=ServingProgram(replica.engine),
        resources=spec.resources.of_replica(replica.gpus),
        environment=spec.environment,
        nodes=NodeRequest(nodes=replica.nodes, gpus_per_node=replica.gpus // replica.nodes),
        supervise=_supervision(inputs.load_limit_seconds),
    )
    job = Job(part, inputs.silent_profile, part)
    start = engine_start(inputs)
    refused = refusals_of(replica.engine, start)
    if refused:
        raise InvalidInputError([inputs.spec.problem("engine", line) for line in refused])
    # Weights are read where they are, or copied to a disk of each node.
    local = [system.path for system in profile.filesystems if system.kind == "local"]
    stage_directory = None
    if spec.weights.stage and not any(inputs.weights.is_relative_to(path) for path in local):
        stage_directory = profile.software.scratch or next(iter(local), None)
    config = ReplicaConfig(
        service=str(service.directory),
        name=str(PROTOTYPE),
        engine=replica.engine,
        start=start,
        nodes=replica.nodes,
        url_host=profile.metrics.address,
        ports=port_range(profile.metrics.ports) if profile.metrics.ports else None,
        stage_directory=stage_directory,
        load_limit_seconds=inputs.load_limit_seconds,
        notice_seconds=float(spec.drain.notice),
        drain_seconds=float(spec.drain.longest),
        term_seconds=term_seconds(job.profile, job.partition),
    )
    times, limit_seconds = leave_times(spec.drain), float(job.walltime)
    several = "The first task answers requests, and the others run their part of the engine. "
    note = (
        "One task per node, which starts the engine behind a shield: Slurm's signals reach the "
        f"task only. {several if replica.nodes > 1 else ''}Logs of each attempt and task are kept "
        "apart."
    )
    task = JobTask(
        title=f"a replica of {printable_line(spec.name)} on {profile.name}: {part.nodes}, "
        f"{replica.engine}",
        layout=(
            f"tp {replica.tp} · pp {replica.pp} · weights {replica.precision} · keys and values "
            f"{replica.kv_precision} · {replica.max_sequences} requests at a time"
        ),
        settings="replica.json",
        tasks=_one_per_node(job, "hpctrain.serve.replica", note),
        warning_seconds=times.warning_seconds(limit_seconds),
        warning_note=times.warning_sentence(limit_seconds),
        continuation_note=(
            f"Continuation {profile.continuation}, from profile {profile.name}: after preemption "
            f"and node failure {continuation_clause(job.profile)}; before the time limit the "
            "controller starts a successor"
        ),
        job_texts=(
            ("engine.python", spec.engine.python or ""),
            *(("engine.arguments", word) for word in spec.engine.arguments),
        ),
    )
    run, weights = service.replica(PROTOTYPE), (str(inputs.weights),)
    return _documents(service, inputs, "replica", run, job, task, config, weights)


def engine_start(inputs: ServiceInputs) -> EngineStart:
    """Choose what the engine of a replica is started with.

    Raises InvalidInputError for weights or adapters whose own settings cannot be read.
    """
    spec, profile, plan = inputs.spec.document, inputs.profile.document, inputs.plan.replica
    adapters = []
    for name, path in spec.weights.adapters.items():
        rank = _json(Path(path) / "adapter_config.json").get("r")
        if not isinstance(rank, int):
            raise InvalidInputError([Problem(f"adapter `{name}` names no rank (`r`)", path)])
        adapters.append(LoraAdapter(name, os.path.abspath(path), rank))
    # A run's checkpoint has no config.json, and is never quantized.
    config = inputs.weights / "config.json"
    return EngineStart(
        python=spec.engine.python or profile.software.interpreter(inputs.python),
        model_path=str(inputs.weights),
        served_name=spec.served_name,
        host=profile.metrics.address or "0.0.0.0",
        port=0,
        tensor_parallel=plan.tp,
        pipeline_parallel=plan.pp,
        precision=plan.precision,
        quantized_checkpoint=config.exists() and bool(_json(config).get("quantization_config")),
        kv_precision=plan.kv_precision,
        max_model_tokens=plan.max_length,
        max_sequences=plan.max_sequences,
        max_batched_tokens=plan.batch_tokens,
        memory_fraction=spec.engine.memory_fraction,
        adapters=tuple(adapters),
        drain_seconds=round(float(spec.drain.longest)),
        extra_arguments=tuple(spec.engine.arguments),
        cpu=CpuEngine() if profile.gpu.emulated else None,
    )


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInputError([Problem(f"cannot be read: {error.strerror}", str(path))]) from None
    except ValueError as error:
        raise InvalidInputError([Problem(f"is no JSON: {error}", str(path))]) from None
    return found if isinstance(found, dict) else {}


def router_documents(service: ServiceLayout, inputs: ServiceInputs) -> ServiceJobDocuments:
    """Make the documents of the router's job: one node, some CPUs, all else as the replicas have.

    Raises InvalidInputError for what sbatch rejects, UsageError for a partition that is not there.
    """
    spec, profile = inputs.spec.document, inputs.silent_profile
    router, wanted = spec.router, spec.resources
    partition = router.partition or wanted.partition
    if profile.slurm.partition(partition) is None:
        words = f"profile {profile.name} has no partition {partition}"
        raise UsageError(words, hint="change `router.partition`")
    same = partition == wanted.partition
    part = ServicePart(
        name=spec.name,
        engine=ServingProgram(router.name),
        resources=ResourcesSpec(
            gpus=1,
            walltime=wanted.walltime if same else None,
            partition=partition,
            account=wanted.account,
            qos=wanted.qos if same else None,
            reservation=wanted.reservation if same else None,
            exclude=wanted.exclude,
            cpus_per_gpu=router.cpus,
            memory_per_node=router.memory,
        ),
        environment=spec.environment,
        nodes=NodeRequest(nodes=1, gpus_per_node=0),
        supervise=_supervision(_ROUTER_SETUP_SECONDS),
    )
    job = Job(part, profile, part)
    warning_seconds = leave_times(spec.drain).warning_seconds(float(job.walltime))
    layout = f"{router.name} · {router.policy} · {router.cpus} CPUs"
    layout += " · TLS" if router.tls is not None else ""
    layout += " · a token is needed" if router.token_file is not None else ""
    task = JobTask(
        title=f"the router of {printable_line(spec.name)} on {profile.name}",
        layout=layout,
        settings="router.json",
        tasks=_one_per_node(
            job, "hpctrain.serve.router", "One task. Logs of each attempt are kept apart."
        ),
        warning_seconds=warning_seconds,
        warning_note=(
            f"USR1 comes {warning_seconds} s before the time limit: no more requests are taken, "
            "and those that have begun end"
        ),
        continuation_note=continuation_sentence(profile),
        job_texts=(
            ("engine.python", spec.engine.python or ""),
            ("router.program", router.program or ""),
        ),
    )
    own = RouterJobSettings(
        service=str(service.directory), term_seconds=term_seconds(profile, job.partition)
    )
    return _documents(service, inputs, "router", service.router, job, task, own)


def _supervision(setup_stall_seconds: float) -> SuperviseSpec:
    """Choose when the supervisor of a service's job acts; `setup_stall_seconds`: for its start."""
    return SuperviseSpec(stall=_STALL, setup_stall=Duration(setup_stall_seconds))


def _one_per_node(job: Job, module: str, note: str) -> SrunTasks:
    """Choose one task on each node, with its GPUs; one that has none gets the CPUs of a GPU."""
    return SrunTasks(
        tasks=job.plan.nodes.nodes,
        tasks_per_node=1,
        gpus_per_task=max(1, job.plan.nodes.gpus_per_node),
        module=(module,),
        task_kind="rank",
        log_number="%4t",
        labelled=False,
        note="\n# ".join(textwrap.wrap(note, 98)),
    )


def _documents(
    service: ServiceLayout,
    inputs: ServiceInputs,
    part: Literal["replica", "router"],
    run: RunLayout,
    job: Job,
    task: JobTask,
    own: BaseModel,
    weights: tuple[str, ...] = (),
) -> ServiceJobDocuments:
    """Make the documents of a job that runs `task` with the settings `own`.

    `weights`: directories that its nodes must be able to read. Raises InvalidInputError for what
    sbatch cannot take.
    """
    nodes, templates = job.plan.nodes.nodes, site_templates(inputs.profile)
    script = job_script(
        job,
        ScriptFacts(
            run_id=run.run_id,
            comment=run_comment(run.run_id),
            spec_digest=inputs.spec.digest,
            profile_digest=inputs.profile.digest,
            python=inputs.python,
            setup=setup_file(inputs.profile),
            template_sha256=None if templates is None else templates_digest(templates),
        ),
        task,
    )
    words = ServiceWords(service.service_id, short_duration(_PROGRESS_SECONDS))
    return ServiceJobDocuments(
        script=render_service_script(part, script, words, templates),
        supervise=supervise_config(
            job,
            run.run_id,
            service.directory.parent,
            (LaunchShape(nodes=nodes, tasks=nodes, train_config=task.settings),),
            target_step=1,
            warning_seconds=float(task.warning_seconds),
            verify="auto",
            mttf_seconds=mttf_seconds(job) if part == "replica" else None,
            inputs=weights,
            serves=True,
            served_progress_seconds=_PROGRESS_SECONDS,
        ),
        signatures=load_signatures(profile_search_path()).to_json(),
        prologue=prologue_text(job),
        own=own,
    )


# -- the settings of the router and of the controller -------------------------------------------


def service_settings(
    spec: ServiceSpec, profile: ClusterProfile, plan: ServicePlan, service_id: str
) -> ServiceSettings:
    """Make the settings of a service."""
    replicas, most_gpus = spec.replicas, spec.resources.max_gpus
    most = max(replicas.max if replicas.max is not None else plan.count, replicas.min)
    hours = ((of_day.split(":"), share) for of_day, share in replicas.hours.items())
    return ServiceSettings(
        service_id=service_id,
        engine=plan.replica.engine,
        router=router_settings(spec, profile),
        scaling=ScalingSettings(
            count=min(plan.count, most),
            spare=min(plan.spare, max(0, most - 1)),
            least=replicas.min,
            most=most,
            capacity_rate=plan.capacity_rate / max(1, plan.replicas),
            hours=tuple(sorted((60 * int(h) + int(m), share) for (h, m), share in hours)),
            time_zone=replicas.time_zone,
            react=replicas.react,
            idle_seconds=float(replicas.idle) if replicas.idle is not None else None,
            most_jobs=None if most_gpus is None else most_gpus // plan.replica.gpus,
        ),
        load_seconds=plan.load_seconds,
        drain_seconds=plan.drain_seconds,
        poll_seconds=float(profile.limits.poll),
    )


def router_settings(spec: ServiceSpec, profile: ClusterProfile) -> RouterSettings:
    """Make the settings of a service's router; vllm-router has half of the processors itself."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

    router, ports, tls = spec.router, profile.metrics.ports, spec.router.tls
    threads = router.cpus if router.name == "haproxy" else max(1, router.cpus // 2)
    return RouterSettings(
        name=router.name,
        program=router.program,
        python=spec.engine.python or profile.software.python,
        policy=router.policy,
        place=router.place,
        port=router.port,
        ports=port_range(ports) if ports is not None else None,
        address=router.address or profile.metrics.address,
        certificate=absolute(tls.certificate if tls is not None else None),
        key=absolute(tls.key if tls is not None else None),
        token_file=absolute(router.token_file),
        rate_limit=router.rate_limit,
        retries=router.retries,
        processes=min(threads, _MOST_THREADS),
    )


# -- writing them -------------------------------------------------------------------------------


def write_prototype(service: ServiceLayout, documents: ServiceJobDocuments) -> None:
    """Write the documents of all replicas, and the code that they run. Raises OSError."""
    prototype = service.prototype
    make_private_directory(prototype.directory)
    for path, text in documents.texts(prototype).items():
        replace_text(path, text, mode=0o600)
    keep_code(prototype)


def write_router(service: ServiceLayout, inputs: ServiceInputs) -> RunLayout:
    """Write the settings of the service, and the run directory of its router's job.

    The ledger comes last: without it a directory is what an interrupted call has left. Of a router
    that there has been before, documents and code are replaced. Raises InvalidInputError, and
    UsageError for a directory that cannot be written.
    """
    documents, run = router_documents(service, inputs), service.router
    settings = service_settings(
        inputs.spec.document, inputs.profile.document, inputs.plan, service.service_id
    )
    try:
        replace_text(service.settings, settings.model_dump_json(indent=1), mode=0o600)
        if not run.directory.exists():
            run.create()
        for path, text in documents.texts(run).items():
            replace_text(path, text, mode=0o600)
        keep_code(run)
    except OSError as error:
        where = error.filename or run.directory
        raise UsageError(f"{where} cannot be written: {error.strerror}") from error
    digest = hashlib.sha256(documents.script.encode()).hexdigest()
    RunFiles(run).ledger.append(EventKind.RENDERED, script_sha256=digest)
    return run
