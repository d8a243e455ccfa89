"""Which Slurm jobs a run has, from its ledger. Pure.

A run that Slurm does not requeue goes on in a new job each time: a successor that waits behind the
running one (chain), or jobs that were submitted together (singletons, the elements of an array).
All jobs since somebody last submitted the run are one **generation**; what is said about earlier
ones does not count any more. Belongs here: reading that. Does not belong here: what Slurm says
about the jobs, or making them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.store.ledger import Event, EventKind


def generation(events: Sequence[Event]) -> list[Event]:
    """The events from the newest submission of the run on, that one included; empty before it."""
    for number in range(len(events) - 1, -1, -1):
        if _begins_generation(events[number]):
            return list(events[number:])
    return []


def _begins_generation(event: Event) -> bool:
    return event.event is EventKind.SUBMITTED and event.successor_of is None


def submitted_ids(events: Sequence[Event]) -> list[int]:
    """The ids that sbatch has given, oldest first; of an array the one id of the whole."""
    found = (event.job_id for event in events if event.event is EventKind.SUBMITTED)
    return [job_id for job_id in found if job_id is not None]


def started_ids(events: Sequence[Event]) -> list[int]:
    """The ids of the jobs that have begun, oldest first; of an array those of its elements."""
    found = (event.job_id for event in events if event.event is EventKind.ATTEMPT_STARTED)
    return list(dict.fromkeys(job_id for job_id in found if job_id is not None))


def cancel_requested(events: Sequence[Event]) -> bool:
    """Somebody has cancelled the newest generation."""
    return any(event.event is EventKind.CANCEL_REQUESTED for event in generation(events))


def successor_ids(events: Sequence[Event], job_id: int) -> list[int]:
    """The jobs that were submitted to go on after `job_id`."""
    return submitted_ids([event for event in events if event.successor_of == job_id])
