"""Starts the router of a service, with its controller: as a Slurm job, or on this login node.

Before the time limit ends a job of the router it submits the next one, which takes over by the
service's epochs: from then on the old one only passes requests on, until clients have found the new
address. Belongs here: submitting these jobs, when the next one is due, and whether a login node
lets a router run on. Does not belong here: the documents of the job (`service_job`), what the
router does (`hpctrain.serve.router`), replicas (`replicas`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, SlurmError, SlurmUnreachableError, UsageError
from hpctrain.job.job_queries import find_jobs, jobs_of, record_found
from hpctrain.job.job_submission import submit_jobs
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.requests import take_back
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import Address, ServiceEventKind, ServiceLedger
from hpctrain.records.supervise_config import known_supervise_config
from hpctrain.serve.jobs import EARLY_SECONDS
from hpctrain.serve.replica.life import say
from hpctrain.serve.replicas import copy_job
from hpctrain.slurm.client import SlurmClient

# A small job without GPUs; a site where it waits for longer has a gap, and place: login has none.
_QUEUE_SECONDS = 300.0
_LOAD_MARGIN = 1.5
_RETRY_SECONDS = 30.0
_LOOK_SECONDS = 300.0
# No job spends more than this share of its time beside its successor.
_MOST_OVERLAP_SHARE = 0.5
# How long the router on a login node may take until its address is there.
_START_SECONDS = 90.0
# logind.conf(5): what a user leaves running ends with the last session unless the user lingers.
_LOGIND = (Path("/etc/systemd/logind.conf"), Path("/etc/systemd/logind.conf.d"))
_LINGER = Path("/var/lib/systemd/linger")


def start_router(service: ServiceLayout, slurm: SlurmClient) -> int:
    """Submit the router's first job and return its id; of a router that has a job the id of that.

    Raises UsageError for a service without a router's directory, SlurmUnreachableError and
    SlurmRefusedError.
    """
    if not service.router.ledger.exists():
        raise UsageError(f"{service.directory} has no router: `hpctrain serve up` first")
    generations = [service.router_generation(number) for number in service.router_generations()]
    found = find_jobs([RunFiles(run) for run in generations if run.ledger.exists()], slurm)
    if not all(jobs.answered for jobs in found.values()):
        raise SlurmUnreachableError("Slurm does not say whether the router has a job")
    live = [job.submitted_id for jobs in found.values() for job in jobs.live]
    return max(live) if live else _submitted(service, RunFiles(service.router), slurm)


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


class Successor:
    """The job after this one; times in seconds since the epoch."""

    def __init__(
        self, service: ServiceLayout, run: RunLayout, job_id: int | None, slurm: SlurmClient
    ) -> None:
        numbers = service.router_generations()
        self._service, self._own_id, self._slurm = service, job_id, slurm
        self._number = next(n for n in numbers if service.router_generation(n) == run)
        config = known_supervise_config(run.supervise_config)
        self._warning_seconds = config.warning_seconds if config is not None else 0.0
        self._begins, self._leaves = 0.0, float("inf")
        self._load_seconds = 0.0
        self._next_look = self._next_try = 0.0
        self.job_id: int | None = None

    def loaded_in(self, seconds: float) -> None:
        """Remember how long this job took to listen."""
        self._load_seconds = seconds

    @property
    def due_at(self) -> float:
        """When the next job is to be submitted; infinite without a time limit."""
        lead_seconds = _LOAD_MARGIN * self._load_seconds + _QUEUE_SECONDS
        most = _MOST_OVERLAP_SHARE * max(0.0, self._leaves - self._begins)
        return self._leaves - min(lead_seconds, most)

    def _look(self, now: float) -> None:
        """Ask Slurm for the times of this job; an administrator may change them."""
        if now < self._next_look or self._own_id is None:
            return
        self._next_look = now + _LOOK_SECONDS
        with contextlib.suppress(SlurmError):
            job = self._slurm.jobs([self._own_id]).get(self._own_id)
            if job is None or job.start_time is None or job.time_limit_seconds is None:
                return
            ends = job.start_time + job.time_limit_seconds
            self._begins, self._leaves = job.start_time, ends - self._warning_seconds
            self._leaves -= EARLY_SECONDS

    def start_in_time(self, now: float) -> None:
        """Submit the next job if it is time to and there is none; tried again if Slurm refuses."""
        self._look(now)
        if self.job_id is not None or now < max(self.due_at, self._next_try):
            return
        self._next_try = now + _RETRY_SECONDS
        try:
            self.job_id = start_next_router(self._service, self._number, self._slurm)
            say(f"job {self.job_id} follows this one, which leaves in {self._leaves - now:.0f} s")
        except HpctrainError as error:
            say(f"no job follows yet: {error}")


# -- a router on this login node, detached from the terminal ------------------------------------


def start_router_here(service: ServiceLayout, environment: Mapping[str, str]) -> Address:
    """Start the router on this node, detached from this terminal, and return its address.

    Raises UsageError where the node ends what users leave running, where a router answers already,
    or where it does not come up, with what it said.
    """
    refuse_where_sessions_end()
    run, standing = service.router, read_record(service.address, Address)
    if not run.ledger.exists():
        raise UsageError(f"{service.directory} has no router: `hpctrain serve up` first")
    if runs_here(service):
        where = f" on {standing.node}" if standing is not None else ""
        raise UsageError(f"the router of `{service.service_id}` runs{where} already")
    take_back(run)
    log = run.logs / "login.log"
    command = [sys.executable, "-m", "hpctrain.serve.router", "--login", str(service.directory)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=service.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ServiceLedger(service.ledger).append(
        ServiceEventKind.ROUTER_STARTED, node=os.uname().nodename, reason="on this node"
    )
    deadline = clock.monotonic() + _START_SECONDS
    while clock.monotonic() < deadline:
        address = read_record(service.address, Address)
        if address is not None and address != standing:
            return address
        if process.poll() is not None:
            break
        clock.sleep(0.1)
    lines = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise UsageError("the router did not come up: " + " / ".join(lines), hint=f"see {log}")


def runs_here(service: ServiceLayout) -> bool:
    """Whether a router on a login node holds the lock of the service."""
    with service.login_lock.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def refuse_where_sessions_end() -> None:
    """Raise UsageError where logind ends the processes of users that log out."""
    if not kills_user_processes(_LOGIND):
        return
    with contextlib.suppress(KeyError):
        if (_LINGER / pwd.getpwuid(os.getuid()).pw_name).exists():
            return
    raise UsageError(
        "this node ends the processes of users that log out (KillUserProcesses), the router too",
        hint="`loginctl enable-linger`, or `router.place: job`",
    )


def kills_user_processes(places: tuple[Path, ...]) -> bool:
    """Whether the settings of logind say so; the last word counts. Unreadable ones say nothing."""
    killing = False
    for place in places:
        files = sorted(place.glob("*.conf")) if place.is_dir() else [place]
        for path in files:
            with contextlib.suppress(OSError):
                for line in path.read_text(errors="replace").splitlines():
                    name, _, value = line.partition("=")
                    if name.strip() == "KillUserProcesses":
                        killing = value.strip().lower() in ("yes", "true", "on", "1")
    return killing
