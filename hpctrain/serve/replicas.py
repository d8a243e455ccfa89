"""Starts replicas of a service as Slurm jobs, and asks them to leave.

The controller in the router's job does both, and so do people by `hpctrain serve`. Belongs here:
making a run directory of the prototype, submitting it, its stop request. Does not belong here: what
the prototype contains (`service_job`), how many replicas there are (the controller), how a
replica leaves (`hpctrain.serve.replica.drain`).
"""

from __future__ import annotations

import hashlib
import os
import shutil

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import SlurmUnreachableError, UsageError
from hpctrain.job.job_queries import jobs_of, record_found, slurm_of
from hpctrain.job.job_submission import submit_jobs
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import generation, submitted_ids
from hpctrain.records.kept_code import use_archive
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.service_layout import PROTOTYPE, ReplicaName, ServiceLayout
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.runs.control import ask, note
from hpctrain.slurm.client import SlurmClient


def start_replica(service: ServiceLayout, name: ReplicaName, slurm: SlurmClient) -> int:
    """Submit the job of a replica and return its id.

    One whose submission was interrupted is submitted now, and of one that has a job the id is
    returned. Raises UsageError for a service without a prototype or a directory that cannot be
    written, SlurmRefusedError and SlurmUnreachableError as `submit_jobs`.
    """
    layout = service.replica(name)
    if not layout.ledger.exists():
        if not service.prototype.script.exists():
            words = f"{service.directory} has no prototype of its replicas: `serve up` first"
            raise UsageError(words)
        copy_job(service.prototype, layout, str(PROTOTYPE), str(name))
    run = RunFiles(layout)
    events = run.ledger.events()
    recorded = submitted_ids(generation(events))
    if recorded:
        return recorded[0]
    if any(event.event is EventKind.SUBMITTING for event in events):
        # Its client died in between, or had no answer: Slurm may have the job.
        found = jobs_of(run, slurm)
        if not found.answered:
            raise SlurmUnreachableError(f"Slurm does not say whether {run.run_id} has a job")
        record_found(run, found)
        if found.live:
            return found.live[0].submitted_id
    return submit_jobs(run, slurm)


def drain_replica(
    service: ServiceLayout, name: ReplicaName, slurm: SlurmClient, reason: str = ""
) -> None:
    """Ask a replica to leave; a job that waits in the queue is cancelled.

    Nothing happens to one that was asked before or is over. Raises UsageError for one that there is
    none of, SlurmError.
    """
    layout = service.replica(name)
    if not layout.ledger.exists():
        raise UsageError(f"service `{service.service_id}` has no replica {name}")
    run = RunFiles(layout)
    found = jobs_of(run, slurm)
    if found.answered and not found.live:
        return
    if layout.stop_request.exists():
        note(run, "stop", f"{reason} (again)" if reason else "again")
    else:
        ask(run, "stop", reason)
    for job in found.waiting:
        slurm_of(run, slurm).cancel_waiting(job.job_id)


def copy_job(known: RunLayout, made: RunLayout, old: str, new: str) -> None:
    """Make the run directory of a job of a known one, with the word `new` in place of `old`.

    The ledger comes last: without it a directory is what an interrupted call has left. Raises
    UsageError for a directory that cannot be written.
    """
    own = known.replica_config, known.router_config
    shells = known.prologue, known.container_shell, known.commands
    documents = known.script, known.supervise_config, *own, known.signatures, *shells
    try:
        shutil.rmtree(made.directory, ignore_errors=True)
        made.create()
        for path in documents:
            if path.exists():
                text = path.read_text().replace(old, new)
                replace_text(made.directory / path.name, text, mode=0o600)
        # its code is the same file where links are possible
        archive = known.current_code.resolve(strict=True)
        target = made.kept_software / archive.name
        try:
            os.link(archive, target)
        except OSError:
            shutil.copyfile(archive, target)
            target.chmod(0o600)
        use_archive(made, archive.name)
    except OSError as error:
        where = error.filename or made.directory
        raise UsageError(f"{where} cannot be written: {error.strerror}") from error
    digest = hashlib.sha256(made.script.read_bytes()).hexdigest()
    cluster = read_supervise_config(made.supervise_config).submission.cluster
    RunFiles(made).ledger.append(EventKind.RENDERED, script_sha256=digest, slurm_cluster=cluster)
