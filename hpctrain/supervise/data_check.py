"""Refuse a launch on data that differ from those that the run has trained on.

Losses after a silent change look plausible and mean nothing. Belongs here: judging a comparison.
Does not belong here: comparing (`hpctrain.records.data_identity`).
"""

from __future__ import annotations

from hpctrain.base.errors import HpctrainError
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import Verdict
from hpctrain.records.data_identity import (
    InterruptedReadingError,
    compare,
    read_identity,
    recorded_again,
    with_touched,
    write_identity,
)
from hpctrain.records.known_steps import known_steps
from hpctrain.records.ledger import EventKind
from hpctrain.supervise.context import AttemptContext, log_message

_MOST_NAMED, _MOST_EVIDENCE = 3, 6


def data_problem(context: AttemptContext) -> Verdict | None:
    """Compare the data with their record; return the verdict that prevents a launch, if any.

    Before the first step nothing depends on the data yet, so a change is only recorded. A file that
    cannot be read is left to the ranks, which see whether others can. Raises OSError when the
    record itself cannot be read or renewed.
    """
    accept = f"`hpctrain resume {context.config.run_id} --accept-data`"
    remedy = f"restore what it was, or accept what it is with {accept}"
    run = context.run_layout
    try:
        identity = read_identity(run.data_identity)
        if identity is None:
            return None
        found = compare(identity, lambda: context.signals.final)
    except InterruptedReadingError as error:
        log_message(str(error))  # the job is being ended
        return None
    except HpctrainError as error:
        return Verdict(Cause.DATA_CHANGED, f"{error}; {remedy}")
    for problem in found.unread:
        log_message(f"data: {problem}")
    if found.touched:
        names = ", ".join(file.path for file in found.touched[:_MOST_NAMED])
        log_message(
            f"data: {len(found.touched)} files have another time and the same content: {names}"
        )
        write_identity(run.data_identity, with_touched(identity, found))
    if not found.changed:
        return None
    named = "; ".join(found.changed[:_MOST_NAMED])
    more = len(found.changed) - _MOST_NAMED
    reason = f"the data have changed: {named}" + (f"; and {more} more" if more > 0 else "")
    known = known_steps(run, context.ledger.events())
    if not known.saved and not known.trained:
        reason = f"{reason}; before the first step, so they are recorded anew"
        context.note(EventKind.OBSERVED, reason=reason)
        log_message(reason)
        write_identity(run.data_identity, recorded_again(identity))
        return None
    evidence = found.changed[:_MOST_EVIDENCE]
    return Verdict(Cause.DATA_CHANGED, f"{reason}; {remedy}", evidence)
