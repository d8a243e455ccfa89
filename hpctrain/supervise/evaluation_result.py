"""Record the start or the end of an evaluation job: the program that its script calls.

    python -m hpctrain.supervise.evaluation_result started NAME STEP EPOCH ATTEMPT
    python -m hpctrain.supervise.evaluation_result ended NAME STEP EPOCH ATTEMPT EXIT_CODE

It runs in the run directory, on the node of the job. Belongs here: from an exit code and the file
of the command to one line of the record. Does not belong here: what is done about a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base import clock
from hpctrain.records.evaluations import (
    EvaluationEvent,
    append_event,
    parse_metrics,
)
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest

FAILED_EXIT_CODE = 1


def record(arguments: Sequence[str], run: RunLayout, job_id: int) -> int:
    """Append the line; returns the exit code of the job."""
    what, name, step, epoch, attempt, *rest = arguments
    event = EvaluationEvent(
        kind="started" if what == "started" else "ended",
        name=name,
        step=int(step),
        epoch=int(epoch),
        attempt=int(attempt),
        time=clock.now(),
        by="job",
        job_id=job_id,
    )
    replaced = _replaced_by(run, int(step), int(epoch))
    if replaced is not None:
        reason = f"launch {replaced} has saved step {step} again: this job was for launch {epoch}"
        append_event(run, event.model_copy(update={"kind": "ended", "reason": reason}))
        print(f"hpctrain: evaluation {name}: {reason}", file=sys.stderr)
        return FAILED_EXIT_CODE
    if what == "started":
        append_event(run, event)
        return 0
    code = int(rest[0])
    metrics, reason = parse_metrics(run.evaluation_output(name, int(step), int(attempt)))
    if code != 0:
        log = run.evaluation_log(name, int(step), int(attempt), job_id)
        metrics, reason = None, f"exit code {code}: {log.relative_to(run.directory)}"
    elif metrics is None:
        log = run.evaluation_log(name, int(step), int(attempt), job_id)
        reason = f"{reason}: {log.relative_to(run.directory)}"
    update = {"exit_code": code, "metrics": metrics, "reason": reason or None}
    append_event(run, event.model_copy(update=update))
    if metrics is None:
        print(f"hpctrain: evaluation {name} of step {step}: {reason}", file=sys.stderr)
        return FAILED_EXIT_CODE
    return 0


def _replaced_by(run: RunLayout, step: int, epoch: int) -> int | None:
    """Return the other launch that has saved the checkpoint on disk, as after a rollback.

    None if it is the one of `epoch`, or if nothing says so: the command sees what is there.
    """
    manifest = read_manifest(run.checkpoints / checkpoint_name(step))
    return None if manifest is None or manifest.epoch == epoch else manifest.epoch


if __name__ == "__main__":
    sys.exit(record(sys.argv[1:], RunLayout(Path.cwd()), int(os.environ["SLURM_JOB_ID"])))
