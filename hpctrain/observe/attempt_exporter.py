"""`python -m hpctrain.observe.attempt_exporter --run-directory DIRECTORY`: metrics from in a job.

It runs beside training until its stdin is closed, which also happens when whoever started it is
killed, and asks Slurm nothing. Where metrics go is in `supervise.json`: a file for the
node_exporter of this node, an endpoint, or both. What it cannot do is one line on stderr. Belongs
here: the process. Does not belong here: metrics (`hpctrain.observe.run_metrics`), outlets
(`hpctrain.observe.metrics_outlets`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.beside_training import give_way, stdin_closed_within
from hpctrain.base.errors import HpctrainError
from hpctrain.base.formats import NewerFormatError
from hpctrain.observe.metrics_outlets import (
    MetricsServer,
    Textfile,
    host_name,
    published_endpoint,
)
from hpctrain.observe.run_metrics import RunMetrics
from hpctrain.observe.samples import Sample
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.supervise_config import MetricsSettings, read_supervise_config
from hpctrain.runs.status import ObservedRun
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

# So often the run directory is read; plan/footprint/footprint.yaml counts by it.
PASS_SECONDS = 15.0


class AttemptExporter:
    """Collects the samples of one run from inside its job, without asking Slurm anything.

    `account_share`: of the time, for the account of all steps.
    """

    account_share = 0.02

    def __init__(self, run: RunFiles, environment: Mapping[str, str]) -> None:
        self._metrics = RunMetrics(run)
        self._job = JobRecord(
            job_id=int(environment["SLURM_JOB_ID"]),
            state=JobState.RUNNING,
            node_list=environment.get("SLURM_JOB_NODELIST"),
            account=environment.get("SLURM_JOB_ACCOUNT"),
        )

    def samples(self, now: float | None = None) -> list[Sample]:
        """Collect the samples; an error of reading leaves the run out."""
        now = clock.now() if now is None else now
        run = self._metrics.run
        with contextlib.suppress(OSError, NewerFormatError):
            run.layout.require()
            observed = ObservedRun(run, run.ledger.events(), RunJobs((self._job,)))
            return list(self._metrics.samples(observed, now, self.account_share))
        return []


def main(argv: Sequence[str]) -> int:
    """Export until stdin is closed; the exit code is 1 if nothing could be exported."""
    run = RunLayout(Path(argv[argv.index("--run-directory") + 1]).absolute())
    try:
        settings = read_supervise_config(run.supervise_config).metrics
        if settings is not None:
            give_way()
            _export(run, settings)
    except ImportError as error:
        print(f"the Python package {error.name or error} is not installed", file=sys.stderr)
        return 1
    except (HpctrainError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def _export(run: RunLayout, settings: MetricsSettings) -> None:
    """Hand out the samples of each pass, and take them back at the end.

    Raises OSError where the text file could not be written at last; it may be away for a while.
    """
    source = AttemptExporter(RunFiles(run), os.environ)
    problem: OSError | None = None
    with contextlib.ExitStack() as outlets:
        file = server = None
        if settings.textfile is not None:
            file = Textfile(Path(settings.textfile), run.run_id)
            outlets.callback(file.remove)
            file.remove_abandoned()
        if settings.endpoint:  # on the first free port of its range
            first, last = settings.ports or (0, 0)
            for port in range(first, last + 1):
                with contextlib.suppress(HpctrainError):
                    server = MetricsServer(settings.address or "", port)
                    break
            else:
                where = f"{settings.address or '*'}:{first}"
                raise HpctrainError(
                    f"no port from {where} to {last} is free for the endpoint of metrics"
                )
            outlets.callback(server.close)
            host = settings.address or host_name(os.environ)
            outlets.enter_context(published_endpoint(run, f"{host}:{server.port}"))
        over = False
        while not over:
            samples = source.samples()
            if server is not None:
                server.replace(samples)
            if file is not None:
                problem = None
                try:
                    file.replace(samples)
                except OSError as error:
                    problem = error
            over = stdin_closed_within(PASS_SECONDS)
    if problem is not None:
        raise problem


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
