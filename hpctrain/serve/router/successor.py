"""Start the router's next job in time, so that it listens before the time limit ends this one.

The next job takes over by the service's epochs: from then on this one only passes requests on,
until clients have found the new address. Belongs here: when. Does not belong here: submitting it
(`hpctrain.serve.start_router`), taking over (`controller`).
"""

from __future__ import annotations

import contextlib

from hpctrain.base.errors import HpctrainError, SlurmError
from hpctrain.records.layout import RunLayout
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.supervise_config import known_supervise_config
from hpctrain.serve.replica.log import say
from hpctrain.serve.start_router import start_next_router
from hpctrain.slurm.client import SlurmClient

# Slurm's warning may come as much as a minute early (sbatch(1), --signal).
_EARLY_SECONDS = 60.0
# A small job without GPUs; a site where it waits for longer has a gap, and place: login has none.
_QUEUE_SECONDS = 300.0
_LOAD_MARGIN = 1.5
_RETRY_SECONDS = 30.0
_LOOK_SECONDS = 300.0
# No job spends more than this share of its time beside its successor.
_MOST_OVERLAP_SHARE = 0.5


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
            self._leaves -= _EARLY_SECONDS

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
