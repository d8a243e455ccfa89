"""Why a plan was chosen, in lines of at most 80 columns.

Belongs here: sentences and columns. Does not belong here: which runners-up there are
(`hpctrain.plan.alternatives`).
"""

from __future__ import annotations

from hpctrain.cli.plan_text import entry, seconds_text, wrapped
from hpctrain.plan.documents import Change, Explanation, FrontPoint, RunnerUp
from hpctrain.units import short_bytes

_LEAST_SHOWN = 0.002  # of the winner's step: smaller differences are noise
_PARTS_SHOWN = 3
_FRONT_SHOWN = 6
_MARGIN = 11


def explanation_lines(explanation: Explanation) -> list[str]:
    """Counts, the winner, other meshes, single changes, and the front of time and memory."""
    return [
        *entry("Search", counts_text(explanation)),
        *entry("Winner", explanation.winner.description),
        *entry("", _price(explanation.winner)),
        *_given_lines(explanation.given),
        *_section(f"Other meshes: the best of each of {explanation.groups:,}", explanation.others),
        *_section("The winner with one thing changed", explanation.variants),
        *_front_lines(explanation.front),
    ]


def counts_text(explanation: Explanation) -> str:
    """`121,170 candidates in 0.18 s: 100,524 break a rule, ...`"""
    counts, seconds = explanation.counts, explanation.search_seconds
    took = f" in {seconds:.2f} s" if seconds is not None else ""
    return (
        f"{counts.enumerated:,} candidates{took}: {counts.infeasible:,} break a rule, "
        f"{counts.too_large:,} do not fit, {counts.fitting:,} fit ({counts.tight:,} of them "
        "with less than 6% to spare)"
    )


def _price(runner: RunnerUp) -> str:
    memory = f"{short_bytes(runner.peak_bytes)} a GPU"
    if runner.step_seconds is None:
        return memory
    return f"{seconds_text(runner.step_seconds)} a step · {memory}"


def _given_lines(given: RunnerUp | None) -> list[str]:
    """The layout of the spec beside the one that `parallel: auto` would choose."""
    if given is None:
        return []
    slower = "" if given.slower is None else f"{share(given.slower)}: "
    return [*entry("Given", f"{slower}{given.description}"), *entry("", _loss(given))]


def _section(title: str, runners: tuple[RunnerUp, ...]) -> list[str]:
    if not runners:
        return []
    return ["", title, *(line for runner in runners for line in _runner_lines(runner))]


def _runner_lines(runner: RunnerUp) -> list[str]:
    """Two lines: what it is, and what it loses."""
    head = "no room" if runner.shortage else "" if runner.slower is None else share(runner.slower)
    variant = runner.differs != str(runner.layout)
    name = runner.differs if variant else runner.description
    indent = " " * _MARGIN
    lines = wrapped(name, f"{head:>{_MARGIN - 2}}  ", indent)
    return lines + wrapped(_loss(runner), indent, indent)


def _loss(runner: RunnerUp) -> str:
    """`61.2 GiB · bubble +4.9%, data messages -0.3%`, or by how much it does not fit."""
    shown = ", ".join(change_text(change) for change in shown_changes(runner))
    if runner.shortage is not None:
        missing = (
            f"{short_bytes(runner.shortage.missing_bytes)} too much in stage "
            f"{runner.shortage.stage} ({runner.shortage.component})"
        )
        return missing + (f"; its step: {share(runner.slower)}" if runner.slower else "")
    memory = short_bytes(runner.peak_bytes) + (", tight" if runner.tight else "")
    return f"{memory} · {shown}" if shown else memory


def shown_changes(runner: RunnerUp) -> tuple[Change, ...]:
    """The largest differences that are more than noise."""
    large = [change for change in runner.changes if abs(change.share) >= _LEAST_SHOWN]
    return tuple(large[:_PARTS_SHOWN])


def change_text(change: Change) -> str:
    return f"{change.part.replace('_', ' ')} {share(change.share)}"


def share(part: float) -> str:
    """`+6.1%`"""
    return f"{part:+.1%}"


def _front_lines(front: tuple[FrontPoint, ...]) -> list[str]:
    """A few points of the front, from the fastest to the leanest."""
    if len(front) < 2:
        return []
    count = min(_FRONT_SHOWN, len(front))
    chosen = sorted({round(n * (len(front) - 1) / (count - 1)) for n in range(count)})
    lines = ["", f"Faster costs memory: {len(front)} candidates that none beats in both, of them"]
    for number in chosen:
        point = front[number]
        head = f"{seconds_text(point.step_seconds):>9}  {short_bytes(point.peak_bytes):>9}  "
        lines += wrapped(point.description, head, " " * len(head))
    return lines
