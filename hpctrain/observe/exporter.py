"""Collects the metrics of runs and services in one pass: one squeue for all, then the directories.

Engines of services are asked for their metrics meanwhile, and not waited for longer than a moment.
Belongs here: which runs and services are exported, passes, what the exporter says
about itself. Does not belong here: the metrics of one run or service (`run_metrics`,
`service_metrics`), serving and files (`metrics_outlets`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.job.supervisor_settings import NODE_LEDGER_NAME
from hpctrain.observe.run_metrics import RunMetrics
from hpctrain.observe.samples import Sample, own_sample
from hpctrain.observe.service_metrics import ANSWER_SECONDS, MetricsScraper, ServiceMetrics
from hpctrain.records.find import RunFiles, all_runs, all_services
from hpctrain.records.watch_heartbeat import WatchHeartbeat, heartbeat_path
from hpctrain.runs.node_evidence import node_rows
from hpctrain.runs.status import observe
from hpctrain.serve.service_files import ServiceFiles
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.process import Command, CommandResult, run_command
from hpctrain.slurm.records import JobRecord
from hpctrain.version import __version__

# How long what accounting has said about jobs that are gone stays true enough.
_PAST_SECONDS = 600.0
# What the accounts of all runs together may take of the time of one core.
_ACCOUNTS_SHARE = 0.1


class ExporterSlurm(SlurmClient):
    """Slurm for passes that follow each other: commands are counted, accounting is asked rarely."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.queries = 0
        self._past: dict[frozenset[int], tuple[float, dict[int, JobRecord]]] = {}

        def counted(command: Command) -> CommandResult:
            self.queries += 1
            return run_command(command)

        super().__init__(environment, run=counted)

    def past_jobs(self, ids: Collection[int]) -> dict[int, JobRecord]:
        """Query the jobs that squeue does not know, the same ones once in ten minutes."""
        key, now = frozenset(ids), clock.monotonic()
        known = self._past.get(key)
        if known is None or now - known[0] > _PAST_SECONDS:
            known = (now, super().past_jobs(ids))
            self._past = {key: known}
        return known[1]


class Exporter:
    """Collects the samples of all runs and services below some directories, and of itself.

    Those that are over and were not written to for `since_seconds` are left out. Engines of
    services have `answer_seconds` for an answer.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        slurm: ExporterSlurm,
        since_seconds: float,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._directories, self._slurm = directories, slurm
        self._since_seconds = since_seconds
        self._known: dict[Path, RunMetrics] = {}
        self._services: dict[Path, ServiceMetrics] = {}
        self._scraper = MetricsScraper(answer_seconds)

    def samples(self, now: float | None = None) -> list[Sample]:
        """Make one pass at the time `now` (default: the present); at most one squeue."""
        now, began = clock.now() if now is None else now, clock.monotonic()
        runs = self._runs(now)
        lost = self._begin_services(now)
        observed = observe(runs, self._slurm)
        self._known = {
            run.layout.directory: self._known.get(run.layout.directory) or RunMetrics(run)
            for run in runs
        }
        samples: list[Sample] = []

        def is_unreadable(collect: Callable[[], Sequence[Sample]]) -> bool:
            try:
                samples.extend(collect())
            except (OSError, HpctrainError):
                return True
            return False

        share = _ACCOUNTS_SHARE / max(1, len(observed))
        unreadable = 0
        for one in observed:
            metrics = self._known[one.run.layout.directory]
            unreadable += not one.row.readable or is_unreadable(
                partial(metrics.samples, one, now, share)
            )
        answers = self._scraper.answers()
        services = self._services.values()
        unread = sum(is_unreadable(partial(one.samples, now, answers)) for one in services)
        samples += [
            own_sample("hpctrain_exporter", 1, version=__version__),
            own_sample("hpctrain_exporter_runs", len(runs)),
            own_sample("hpctrain_exporter_unreadable_runs", unreadable),
            own_sample("hpctrain_exporter_services", len(services) + lost),
            own_sample("hpctrain_exporter_unreadable_services", unread + lost),
            own_sample("hpctrain_exporter_timestamp_seconds", now),
            own_sample("hpctrain_exporter_slurm_queries", self._slurm.queries),
        ]
        # The heartbeat of `watch` and the evidence against nodes lie beside the runs.
        passes, suspects = [], 0
        for directory in self._directories:
            with contextlib.suppress(OSError, ValueError):
                beat = WatchHeartbeat.model_validate_json(heartbeat_path(directory).read_bytes())
                passes.append(beat.pass_time)
            with contextlib.suppress(InvalidInputError):
                rows = node_rows(directory / NODE_LEDGER_NAME, now=now)
                suspects += sum(row.avoided for row in rows)
        samples.append(own_sample("hpctrain_suspect_nodes", suspects))
        if passes:  # of several directories the one that is looked after least
            samples.append(own_sample("hpctrain_watch_timestamp_seconds", min(passes)))
        asked = [one.jobs.answered for one in observed if one.jobs is not None]
        if asked:
            samples.append(own_sample("hpctrain_exporter_slurm_up", any(asked)))
        took_seconds = clock.monotonic() - began
        samples.append(own_sample("hpctrain_exporter_collection_seconds", took_seconds))
        return samples

    def _runs(self, now: float) -> list[RunFiles]:
        """List the runs to export; of two with the same id the one written to last."""
        found: dict[str, RunFiles] = {}
        for directory in self._directories:
            for run in all_runs(directory):
                with contextlib.suppress(OSError):
                    quiet_seconds = now - run.layout.ledger.stat().st_mtime
                    if quiet_seconds > self._since_seconds and run.layout.done.exists():
                        continue
                found[run.run_id] = run
        return list(found.values())

    def _begin_services(self, now: float) -> int:
        """Find the services to export, ask their engines, and count those that cannot be read."""
        known: dict[Path, ServiceMetrics] = {}
        targets, lost = [], 0
        for directory in self._directories:
            for service in map(ServiceFiles, all_services(directory)):
                path = service.layout.directory
                if any(one.service.service_id == service.service_id for one in known.values()):
                    continue  # below two directories: its series would be the same
                try:
                    quiet_seconds = now - service.layout.ledger.stat().st_mtime
                    if quiet_seconds > self._since_seconds and service.is_over(service.state):
                        continue
                    metrics = self._services.get(path) or ServiceMetrics(service)
                    targets += metrics.targets(now)
                    known[path] = metrics
                except (OSError, HpctrainError):
                    lost += 1
        self._services = known
        self._scraper.begin(targets)
        return lost
