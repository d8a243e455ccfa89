"""Formats why a plan was chosen, in lines of a width that the caller knows.

Belongs here: sentences and columns. Does not belong here: which runners-up there are
(`hpctrain.plan.alternatives`).
"""

from __future__ import annotations

from hpctrain.base.units import short_bytes
from hpctrain.job.plan_text import entry, seconds_text, wrapped
from hpctrain.page.text import LINE_WIDTH
from hpctrain.plan.documents import TOLD_APART, Certainty, Change, Explanation, FrontPoint, RunnerUp

MULTIPLIERS = {
    "products": "matrix products",
    "attention": "attention kernels",
    "elementwise": "elementwise kernels",
    "nvlink": "messages over NVLink",
    "network": "messages over the network",
    "launch": "launching kernels, overheads",
    "experts": "sending tokens to experts",
    "everything": "everything alike",
    "expert model": "models with experts",
    "low precision": "8-bit and 4-bit precision",
    "new GPU": "a GPU without published rows",
    "activations": "kept activations and buffers",
    "allocator": "the allocator's waste",
    "outside": "memory outside the allocator",
}

_LEAST_SHOWN = 0.002  # of the winner's step: smaller differences are noise
_PARTS_SHOWN = 3
_FRONT_SHOWN = 6
_MARGIN = 11
_LEAST_DOUBT, _DOUBTS_SHOWN = 0.05, 4
_BESIDES = {
    "alike": "what layouts like this one share",
    "noise": "what each layout has alone",
}


def explanation_lines(explanation: Explanation, width: int = LINE_WIDTH) -> list[str]:
    """Format counts, the winner, other meshes, single changes, and the Pareto front."""
    winner, given = explanation.winner, explanation.given
    price = f"{short_bytes(winner.peak_bytes)} a GPU"
    if winner.step_seconds is not None:
        price = f"{seconds_text(winner.step_seconds)} a step · {price}"
    given_lines = []
    if given is not None:  # the spec's layout beside the one that `parallel: auto` would choose
        slower = "" if given.slower is None else f"{share(given.slower)}: "
        given_lines = [
            *entry("Given", f"{slower}{given.description}", width),
            *entry("", _loss(given), width),
        ]
    return [
        *entry("Search", counts_text(explanation), width),
        *entry("Winner", winner.description, width),
        *entry("", price, width),
        *given_lines,
        *_section(
            f"Other meshes: the best of each of {explanation.groups:,}", explanation.others, width
        ),
        *_section("The winner with one thing changed", explanation.variants, width),
        *_front_lines(explanation.front, width),
    ]


def doubt_lines(certainty: Certainty | None, width: int = LINE_WIDTH) -> list[str]:
    """Say what the interval of the step comes from, and what would narrow it."""
    if certainty is None or certainty.step_deviation is None:
        return []
    parts = [one for one in certainty.doubt if one.share >= _LEAST_DOUBT][:_DOUBTS_SHOWN]
    names = MULTIPLIERS | _BESIDES
    told = ", ".join(f"{names.get(one.name, one.name)} {one.share:.0%}" for one in parts)
    text = (
        f"of ±{certainty.step_deviation:.0%} (68%) about the step: {told}; "
        "`hpctrain calibrate RUN ...` narrows it"
    )
    return entry("Doubt", text, width)


def counts_text(explanation: Explanation) -> str:
    """`121,170 candidates in 0.18 s: 100,524 break a rule, ...`"""
    counts, seconds = explanation.counts, explanation.search_seconds
    took = f" in {seconds:.2f} s" if seconds is not None else ""
    return (
        f"{counts.enumerated:,} candidates{took}: {counts.infeasible:,} break a rule, "
        f"{counts.too_large:,} do not fit, {counts.fitting:,} fit ({counts.tight:,} of them "
        "less surely than with 90%)"
    )


def _section(title: str, runners: tuple[RunnerUp, ...], width: int) -> list[str]:
    """Format runners-up below a title, in two lines each: the layout, and what it loses."""
    indent = " " * _MARGIN
    lines = ["", title] if runners else []
    for one in runners:
        head = "no room" if one.shortage else "" if one.slower is None else share(one.slower)
        name = one.description if one.differs == str(one.layout) else one.differs
        lines += wrapped(name, f"{head:>{_MARGIN - 2}}  ", indent, width)
        lines += wrapped(_loss(one), indent, indent, width)
    return lines


def _loss(runner: RunnerUp) -> str:
    """Format `61.2 GiB · bubble +4.9%, data messages -0.3%`, or by how much it does not fit."""
    shown = ", ".join(change_text(change) for change in shown_changes(runner))
    if runner.shortage is not None:
        missing = (
            f"{short_bytes(runner.shortage.missing_bytes)} too much in stage "
            f"{runner.shortage.stage} ({runner.shortage.component})"
        )
        return missing + (f"; its step: {share(runner.slower)}" if runner.slower else "")
    memory = short_bytes(runner.peak_bytes) + (", tight" if runner.tight else "")
    odds = runner.winner_faster
    if odds is not None and runner.slower and odds < TOLD_APART:
        memory += f" · cannot be told apart ({1 - odds:.0%} that it is the faster one)"
    return f"{memory} · {shown}" if shown else memory


def shown_changes(runner: RunnerUp) -> tuple[Change, ...]:
    """Select the largest differences that are more than noise."""
    large = [change for change in runner.changes if abs(change.share) >= _LEAST_SHOWN]
    return tuple(large[:_PARTS_SHOWN])


def change_text(change: Change) -> str:
    return f"{change.part.replace('_', ' ')} {share(change.share)}"


def share(part: float) -> str:
    """`+6.1%`"""
    return f"{part:+.1%}"


def _front_lines(front: tuple[FrontPoint, ...], width: int) -> list[str]:
    """Format a few points of the Pareto front, from the fastest to the leanest."""
    if len(front) < 2:
        return []
    count = min(_FRONT_SHOWN, len(front))
    chosen = sorted({round(n * (len(front) - 1) / (count - 1)) for n in range(count)})
    lines = ["", f"Faster costs memory: {len(front)} candidates that none beats in both, of them"]
    for number in chosen:
        point = front[number]
        head = f"{seconds_text(point.step_seconds):>9}  {short_bytes(point.peak_bytes):>9}  "
        lines += wrapped(point.description, head, " " * len(head), width)
    return lines
