"""Read from a ledger which Slurm jobs a run has. Pure.

A run that Slurm does not requeue continues in a new job each time: a successor that waits behind
the running one (chain), or jobs that were submitted together (singletons, elements of an array).
All jobs since somebody last submitted the run are one **generation**; events of earlier ones no
longer count. Belongs here: reading that, and the comment by which Slurm's records of these jobs are
recognised. Does not belong here: Slurm's records of the jobs, or making them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import Record

_RECORDED = (EventKind.SUBMITTED, EventKind.ADOPTED)
_SUBMISSION = (
    EventKind.SUBMITTING,
    EventKind.SUBMITTED,
    EventKind.ADOPTED,
    EventKind.SUBMIT_FAILED,
)
# Of those of a supervisor, after which no job trains the run further.
_LAST_ACTIONS = ("stop", "finish")
_CANCELS = (EventKind.CANCEL_REQUESTED, EventKind.CANCEL_FAILED, EventKind.CANCELLED)


def run_comment(run_id: str) -> str:
    """The comment of all jobs of a run (sbatch(1), --comment): it finds those that nobody has
    recorded."""
    return f"hpctrain:{run_id}"


def sbatch_options(directory: Path, *, array: bool = False) -> list[str]:
    """Make the options of sbatch that depend on the run directory.

    Slurm reads `%` in the whole path of a log as a pattern, also in the directory (sbatch(1),
    FILENAME PATTERN): a job below such a directory would die at once, with signal 53.
    """
    options = [f"--chdir={directory}"]
    if "%" in str(directory):
        name = "slurm-%A_%a.out" if array else "slurm-%j.out"
        options.append(f"--output={str(directory).replace('%', '%%')}/logs/{name}")
    return options


def generation(events: Sequence[Event]) -> list[Event]:
    """The events from the newest submission of the run on, that one included; empty before it.

    A job that was started by hand is a submission, too, and so is one whose client died before it
    could record the job. A job that has begun before its client recorded it is one submission.
    """
    begin: int | None = None
    begun: set[int | None] = set()  # jobs whose client has not recorded them yet
    for number, event in enumerate(events):
        if event.event is EventKind.SUBMITTING:
            begun.clear()
        elif event.event in _RECORDED:
            if event.successor_of is None and event.job_id not in begun:
                begin = number
            begun.discard(event.job_id)
        elif event.event is EventKind.ATTEMPT_STARTED and begin is None:
            begin = number
            begun.add(event.job_id)
        if event.event is EventKind.ADOPTED:
            begun.add(event.job_id)
    return [] if begin is None else list(events[begin:])


def recorded(events: Sequence[Event]) -> list[Event]:
    """The events by which jobs became known: submitted by a client, or found."""
    return [event for event in events if event.event in _RECORDED]


def submitted_ids(events: Sequence[Event]) -> list[int]:
    """The ids of recorded jobs, oldest first; of an array the one id of the whole."""
    return [event.job_id for event in recorded(events) if event.job_id is not None]


def started_ids(events: Sequence[Event]) -> list[int]:
    """The ids of the jobs that have begun, oldest first; of an array those of its elements."""
    found = (event.job_id for event in events if event.event is EventKind.ATTEMPT_STARTED)
    return list(dict.fromkeys(job_id for job_id in found if job_id is not None))


def job_ids(events: Sequence[Event]) -> list[int]:
    """The ids of all jobs that were recorded or have begun; see `submitted_ids`, `started_ids`."""
    return list(dict.fromkeys([*submitted_ids(events), *started_ids(events)]))


def cluster_of(events: Sequence[Event]) -> str | None:
    """ClusterName of the Slurm that has the newest jobs; None if the ledger does not contain it."""
    return next((event.cluster for event in reversed(generation(events)) if event.cluster), None)


def slurm_cluster_of(events: Sequence[Event]) -> str | None:
    """The cluster that Slurm's commands have to name to reach the run's jobs; None: need not."""
    return next((event.slurm_cluster for event in reversed(events) if event.slurm_cluster), None)


class SiteAnswer(Record):
    """What a site has answered to a submission beside the job's id.

    `messages` are lines of a job_submit plug-in or of the site's command, `changes` sentences about
    what Slurm has made of the job otherwise than its script asks for.
    """

    messages: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """All of it, for people."""
        return (*self.changes, *(f"the site says: {line}" for line in self.messages))


def site_answer(events: Sequence[Event]) -> SiteAnswer:
    """What the site has answered to the submission of the newest generation."""
    recent = generation(events)
    changed = (e.evidence for e in recent if e.event is EventKind.JOB_CHANGED)
    said = dict.fromkeys(line for event in recent for line in event.site_messages)
    return SiteAnswer(messages=tuple(said), changes=tuple(itertools.chain(*changed)))


def being_submitted(events: Sequence[Event]) -> bool:
    """Whether a client has called sbatch and has not recorded an answer."""
    last = last_submission(events)
    return last is not None and last.event is EventKind.SUBMITTING


def ever_submitting(events: Sequence[Event]) -> bool:
    """Whether a client has called sbatch for it, whatever came of that."""
    return any(event.event is EventKind.SUBMITTING for event in events)


def refusals(events: Sequence[Event]) -> list[Event]:
    """The submissions that failed."""
    return [event for event in events if event.event is EventKind.SUBMIT_FAILED]


def last_submission(events: Sequence[Event]) -> Event | None:
    """The newest event of a submission: it begins, it has a job, or it failed."""
    return next((event for event in reversed(events) if event.event in _SUBMISSION), None)


def cancel_requested(events: Sequence[Event]) -> bool:
    """Whether the newest generation is cancelled, or its cancellation announced and not revoked."""
    return _last_cancel(events) in (EventKind.CANCEL_REQUESTED, EventKind.CANCELLED)


def cancel_confirmed(events: Sequence[Event]) -> bool:
    """Whether the newest generation is cancelled and Slurm itself has confirmed that."""
    return _last_cancel(events) is EventKind.CANCELLED


def _last_cancel(events: Sequence[Event]) -> EventKind | None:
    cancels = [event.event for event in generation(events) if event.event in _CANCELS]
    return cancels[-1] if cancels else None


def nothing_follows(events: Sequence[Event]) -> bool:
    """Whether the run is cancelled, stopped or finished, by the word of its own supervisor."""
    if cancel_requested(events):
        return True
    for event in reversed(events):
        if event.event in (EventKind.ATTEMPT_STARTED, EventKind.SUBMITTED):
            return False
        if event.event is EventKind.ACTION:
            return event.action in _LAST_ACTIONS
    return False


def awaited_run(events: Sequence[Event]) -> str | None:
    """The id of the run that has to be done before this one is launched.

    None if it waits for none, or no longer: it was launched, or a person has resumed it after it
    was put back into the queue because the other was not done.
    """
    awaited, put_back = None, False
    for event in events:
        if event.event is EventKind.SUBMITTING:
            awaited, put_back = event.after_run, False
        elif event.event is EventKind.SUBMITTED and event.successor_of is None:
            awaited = event.after_run or awaited
        elif event.event is EventKind.OBSERVED and event.after_run is not None:
            put_back = True
        elif event.event is EventKind.LAUNCH_STARTED or (
            put_back and event.event is EventKind.CONTROL and event.action == "resume"
        ):
            awaited = None
    return awaited


def was_put_back(events: Sequence[Event]) -> bool:
    """Whether the newest job has begun too early, and holds itself in the queue since."""
    recent = generation(events)
    return any(one.event is EventKind.OBSERVED and one.after_run is not None for one in recent)


def successor_ids(events: Sequence[Event], job_id: int) -> list[int]:
    """The jobs that were submitted to continue after `job_id`."""
    return submitted_ids([event for event in events if event.successor_of == job_id])
