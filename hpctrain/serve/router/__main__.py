"""`python -m hpctrain.serve.router RUN_DIRECTORY/router.json`, or `--login SERVICE`.

The first is the one task of the router's job, under the supervisor, and keeps the contract of a
trainer: signs of life, exit records, exit codes (docs/trainer-contract.md). The second runs on a
login node without Slurm around it. Belongs here: the beginning and the end of the process, and
which jobs of replicas there are. Does not belong here: what is in between (`job`).
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.records.layout import RunLayout
from hpctrain.records.requests import is_requested, make_request
from hpctrain.records.run_records import TrainerExit
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import read_service_settings
from hpctrain.serve.jobs import SlurmReplicaJobs
from hpctrain.serve.replica.config import RouterJobSettings, read_program_settings
from hpctrain.serve.replica.life import Life, ReplicaError, SupersededError, say
from hpctrain.serve.router.job import POLL_SECONDS, RouterJob, place_of
from hpctrain.serve.start_router import Successor
from hpctrain.slurm.client import SlurmClient
from hpctrain.train.rank_environment import read_launch
from hpctrain.train.stacks import open_stack_dump
from hpctrain.train.stop import StopSignals
from hpctrain.train.storage import fence_of, outlast

_USAGE = "usage: python -m hpctrain.serve.router RUN_DIRECTORY/router.json | --login SERVICE"
# Of the time between SIGTERM and the end, for the last records.
_SLACK_SECONDS = 3.0


def main(arguments: list[str]) -> int:
    """Run the router's job to its end; returns the exit code."""
    stop = StopSignals()
    stop.install()
    if len(arguments) == 2 and arguments[0] == "--login":
        return run_on_login_node(ServiceLayout(Path(arguments[1]).absolute()), stop)
    if len(arguments) != 1:
        say(_USAGE)
        return TrainerExit.CONFIG_ERROR
    run = RunLayout(Path(arguments[0]).absolute().parent)
    try:
        launch = read_launch(os.environ)
    except InvalidInputError as error:
        say(str(error))
        return TrainerExit.CONFIG_ERROR
    life = Life(run, launch)
    try:
        dump = open_stack_dump(run, launch)
        code = _run_task(Path(arguments[0]).absolute(), life, stop)
        dump.discard_if_unused()
        return code
    except InvalidInputError as error:
        return life.refused(str(error))
    except StaleEpochError as error:
        return life.failed(SupersededError(str(error)), stop.name)
    except (HpctrainError, OSError) as error:
        return life.failed(ReplicaError(str(error)), stop.name)


def _run_task(path: Path, life: Life, stop: StopSignals) -> int:
    """Run the task of a Slurm job until it is asked to leave. Raises HpctrainError, OSError."""
    run = life.run
    own = outlast(run, lambda: read_program_settings(path, RouterJobSettings))
    service = ServiceLayout(Path(own.service))
    settings = outlast(run, lambda: read_service_settings(service.settings))
    life.enter("loading")
    fence = fence_of(run, life.launch)
    outlast(run, fence.check)
    place, slurm = place_of(os.environ, run.logs), SlurmClient(shielded=True)
    job = RouterJob(service, settings, place, SlurmReplicaJobs(service, slurm))
    successor = Successor(service, run, place.job_id, SlurmClient(shielded=True))
    left = settings.drain_seconds
    try:
        began_at = clock.monotonic()
        job.start()
        successor.loaded_in(clock.monotonic() - began_at)
        life.enter("serving")
        while not stop.requested and not is_requested(run, "stop"):
            reason = "the service has ended" if job.is_over else None
            if job.is_superseded and job.is_quiet():
                reason = "another router has taken over"
            if reason is not None:
                # Nobody is to start this router again: the supervisor ends the job with this.
                make_request(run, "stop", reason)
                break
            if not job.is_superseded:
                successor.start_in_time(clock.now())
            job.look()
            life.beat()
            clock.sleep(POLL_SECONDS)
        life.enter("draining")
        if stop.name == "SIGTERM":
            left = min(left, max(_SLACK_SECONDS, own.term_seconds - 2 * _SLACK_SECONDS))
    except BaseException:
        left = 0.0
        raise
    finally:
        job.leave(left)
    return life.left(f"left: {stop.name or 'control/stop'}", stop.name)


def run_on_login_node(service: ServiceLayout, stop: StopSignals) -> int:
    """Run on this host until asked to leave; what fails is started anew by whoever watches."""
    try:
        lock = service.login_lock.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        say(f"error: another router of this service runs: {error.strerror}")
        return TrainerExit.CRASH
    try:
        settings = read_service_settings(service.settings)
        run = service.router
        job = RouterJob(
            service,
            settings,
            place_of(os.environ, run.logs),
            SlurmReplicaJobs(service, SlurmClient()),
        )
        try:
            job.start()
            while not stop.requested and not run.stop_request.exists() and not job.is_over:
                job.look()
                clock.sleep(POLL_SECONDS)
        finally:
            job.leave(settings.drain_seconds if stop.requested or job.is_over else 0.0)
    except HpctrainError as error:
        say(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for an engine that does not answer
