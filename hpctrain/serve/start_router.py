"""Starts the router of a service, with its controller, as a Slurm job.

Belongs here: the run directory of the router's job, and submitting it. Does not belong here: what
the router does (`hpctrain.serve.router`), a router without a job (`router_on_login_node`),
replicas (`serve_replicas`).
"""

from __future__ import annotations

import hashlib

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import SlurmUnreachableError, UsageError
from hpctrain.job.job_queries import find_jobs, jobs_of, record_found
from hpctrain.job.job_submission import submit_jobs
from hpctrain.job.kept_code import keep_code
from hpctrain.plan.documents import NodeRequest
from hpctrain.plan.job import Job, ServicePart, ServingProgram
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import take_back
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import ServiceEventKind, ServiceLedger
from hpctrain.serve.plan.leaving import leave_times, term_seconds
from hpctrain.serve.replicas import copy_job
from hpctrain.serve.router.job_settings import RouterJobSettings
from hpctrain.serve.service_job import (
    ServiceInputs,
    ServiceJobDocuments,
    service_job_documents,
    service_supervision,
)
from hpctrain.serve.service_tasks import router_task
from hpctrain.serve.settings import service_settings
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.run import ResourcesSpec

_SETUP_SECONDS = 600.0


def router_documents(
    service: ServiceLayout, inputs: ServiceInputs
) -> ServiceJobDocuments[RouterJobSettings]:
    """Make the documents of the router's job. Raises InvalidInputError for what sbatch rejects."""
    spec, profile, run = inputs.spec.document, inputs.silent_profile, service.router
    part = _router_part(inputs)
    if profile.slurm.partition(part.resources.partition) is None:
        words = f"profile {profile.name} has no partition {part.resources.partition}"
        raise UsageError(words, hint="change `router.partition`")
    job = Job(part, profile, part)
    warning_seconds = leave_times(spec.drain).warning_seconds(float(job.walltime))
    return service_job_documents(
        service,
        inputs,
        "router",
        run.run_id,
        job,
        router_task(job, spec.router, warning_seconds),
        RouterJobSettings(
            service=str(service.directory), term_seconds=term_seconds(profile, job.partition)
        ),
    )


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


def start_router(service: ServiceLayout, slurm: SlurmClient) -> int:
    """Submit the router's first job and return its id; of a router that has a job the id of that.

    Raises UsageError for a service without a router's directory, SlurmUnreachableError and
    SlurmRefusedError.
    """
    run = RunFiles(service.router)
    if not run.layout.ledger.exists():
        raise UsageError(f"{service.directory} has no router: `hpctrain serve up` first")
    return _live_job(service, slurm) or _submitted(service, run, slurm)


def start_next_router(service: ServiceLayout, number: int, slurm: SlurmClient) -> int:
    """Submit the job after the router's job `number`, and return its id.

    It has the documents of that one. One whose submission was interrupted is submitted now. Raises
    UsageError for a directory that cannot be written, SlurmError.
    """
    run, following = service.router_generation(number), service.router_generation(number + 1)
    if not following.ledger.exists():
        copy_job(run, following, run.run_id, following.run_id)
    return _submitted(service, RunFiles(following), slurm)


def _submitted(service: ServiceLayout, run: RunFiles, slurm: SlurmClient) -> int:
    """Submit a job of the router; the id of the one that it has already."""
    found = jobs_of(run, slurm)
    if not found.answered:
        raise SlurmUnreachableError(f"Slurm does not say whether {run.run_id} has a job")
    record_found(run, found)
    if found.live:
        return found.live[0].submitted_id
    take_back(run.layout)
    job_id = submit_jobs(run, slurm)
    ServiceLedger(service.ledger).append(ServiceEventKind.ROUTER_STARTED, job_id=job_id)
    return job_id


def _live_job(service: ServiceLayout, slurm: SlurmClient) -> int | None:
    """The newest job of the router that has not ended. Raises SlurmUnreachableError."""
    generations = [service.router_generation(number) for number in service.router_generations()]
    runs = [RunFiles(run) for run in generations if run.ledger.exists()]
    found = find_jobs(runs, slurm)
    if not all(jobs.answered for jobs in found.values()):
        raise SlurmUnreachableError("Slurm does not say whether the router has a job")
    live = [job.submitted_id for jobs in found.values() for job in jobs.live]
    return max(live, default=None)


def _router_part(inputs: ServiceInputs) -> ServicePart:
    """Describe the router's job: one node, some CPUs, and all else as the replicas have it."""
    spec = inputs.spec.document
    router, wanted = spec.router, spec.resources
    partition = router.partition or wanted.partition
    same = partition == wanted.partition
    resources = ResourcesSpec(
        gpus=1,
        walltime=wanted.walltime if same else None,
        partition=partition,
        account=wanted.account,
        qos=wanted.qos if same else None,
        reservation=wanted.reservation if same else None,
        exclude=wanted.exclude,
        cpus_per_gpu=router.cpus,
        memory_per_node=router.memory,
    )
    return ServicePart(
        name=spec.name,
        engine=ServingProgram(router.name),
        resources=resources,
        environment=spec.environment,
        nodes=NodeRequest(nodes=1, gpus_per_node=0),
        supervise=service_supervision(_SETUP_SECONDS),
    )
