"""Judge why a launch ended, from its evidence. Pure.

Order of trust: durable records of the run itself (done marker, a newer epoch, a cancel), then
Slurm's record of the job, then requests, then reports of machines and ranks, then the output of
`srun`, then its exit code. `srun`'s code comes last because it is the highest code of all tasks
and is masked by the kill that follows (a rank that exits 3 reads as 143 there). Belongs here: that
order. Does not belong here: each of these sources (`external_verdict`, `rank_verdict`), what to
do about it (`policy`), and any I/O.
"""

from __future__ import annotations

from dataclasses import replace

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import LaunchEvidence, Verdict
from hpctrain.judge.external_verdict import by_requests, by_slurm
from hpctrain.judge.rank_verdict import by_ranks
from hpctrain.judge.root_causes import fingerprint

_MOST_EVIDENCE = 6
_LONGEST_LINE = 400


def classify(evidence: LaunchEvidence) -> Verdict:
    """Judge one launch, with at most six lines of evidence."""
    for judge in (_by_the_run, by_slurm, by_requests, by_ranks, _by_srun):
        verdict = judge(evidence)
        if verdict is not None:
            return _completed(verdict, evidence)
    return _completed(
        Verdict(
            Cause.UNKNOWN,
            f"srun ended with code {evidence.srun_exit_code} and nothing says why",
            evidence.notice_lines[-3:],
        ),
        evidence,
    )


def _by_the_run(evidence: LaunchEvidence) -> Verdict | None:
    if evidence.done:
        return Verdict(Cause.DONE, "the target step is reached and its checkpoint is verified")
    if evidence.superseded:
        return Verdict(Cause.SUPERSEDED, "a newer launch of this run has taken over")
    if evidence.cancel_requested:
        return Verdict(Cause.CANCELLED, "cancelled with `hpctrain cancel`")
    return None


def _by_srun(evidence: LaunchEvidence) -> Verdict | None:
    code = evidence.srun_exit_code
    if code is not None and code < 0:
        return Verdict(
            Cause.CRASH, f"srun itself was killed by signal {-code}", evidence.notice_lines
        )
    if not evidence.started and code not in (0, None):
        reason = f"srun could not start the step (code {code})"
        return Verdict(Cause.LAUNCH_FAILURE, reason, evidence.notice_lines[-3:])
    return None


def _completed(verdict: Verdict, evidence: LaunchEvidence) -> Verdict:
    """Add the fingerprint, and a line that could not be read, because it may hide the cause."""
    lines = [line[:_LONGEST_LINE] for line in verdict.evidence[:_MOST_EVIDENCE]]
    unread = [f.line for f in evidence.findings if f.role == "advice"]
    if unread and verdict.cause in (Cause.CRASH, Cause.HANG, Cause.UNKNOWN):
        lines = [*lines[: _MOST_EVIDENCE - 1], unread[0]]
    return replace(
        verdict, evidence=tuple(lines), fingerprint=fingerprint(verdict.cause, verdict.reason)
    )
