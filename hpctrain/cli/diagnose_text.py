"""A diagnosis in lines of at most 80 columns: what stands out first, the rest in a line each.

Belongs here: sentences and columns. Does not belong here: the answers (`hpctrain.diagnose`).
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.actions.diagnose import Diagnosis
    from hpctrain.diagnose.findings import Finding, Price, Remedy

_WIDTH, _MARGIN, _INDENT = 80, 8, "   "
_GIB = 2**30


def diagnosis_lines(told: Diagnosis) -> list[str]:
    """The run, its step, each finding with evidence and what to do, then what is fine."""
    lines = _entry("Run", _run_words(told))
    if told.step_seconds is not None:
        lines += _entry("Step", _step_words(told))
    if told.shares:
        shares = " · ".join(f"{name} {share:.0%}" for name, share in told.shares.items())
        lines += _entry("Parts", f"{shares} (the middle rank)")
    lines += _entry("Read", " · ".join(f"{one.file}: {one.words}" for one in told.read))
    for number, finding in enumerate(told.stands_out, 1):
        lines += ["", *_finding_lines(number, finding, told.step_seconds)]
    if not told.stands_out:
        lines += ["", "Nothing stands out."]
    for answer, head in (("no", "Fine"), ("unknown", "Unknown")):
        rest = [one for one in told.findings if one.answer == answer]
        if rest:
            lines += ["", head]
        for one in rest:
            lines += _paragraph(f"{one.topic.replace('_', ' '):<15}{one.words}", "  ", hang=17)
    return lines


def _run_words(told: Diagnosis) -> str:
    if not told.ranks:
        return told.run_id
    nodes = f" on {told.nodes} node{'s' * (told.nodes > 1)}" if told.nodes else ""
    return f"{told.run_id}, {told.ranks} rank{'s' * (told.ranks > 1)}{nodes}"


def _step_words(told: Diagnosis) -> str:
    assert told.step_seconds is not None
    predicted = told.predicted_seconds
    beside = "no prediction" if predicted is None else f"the plan said {_seconds(predicted)}"
    return f"{_seconds(told.step_seconds)}; {beside}"


def _finding_lines(number: int, finding: Finding, step_seconds: float | None) -> list[str]:
    lines = _paragraph(f"{finding.question} Yes: {finding.words}.", f"{number}. ", hang=3)
    if finding.gain_seconds is not None and step_seconds:
        bound = "at least" if finding.at_least else "at most"
        share = finding.gain_seconds / step_seconds
        lines += _labelled("gain", f"{bound} {_seconds(finding.gain_seconds)} a step ({share:.0%})")
    for proof in finding.evidence:
        lines += _labelled("seen", f"{proof.words} [{proof.source}]")
    for remedy in finding.remedies:
        lines += _remedy_lines(remedy)
    return lines


def _remedy_lines(remedy: Remedy) -> list[str]:
    price = "" if remedy.price is None else f"; the plan then: {_price_words(remedy.price)}"
    lines = _labelled("do", f"{remedy.words}{price}")
    if remedy.changes:
        words = " ".join(f"--set {change}" for change in remedy.changes)
        lines += _paragraph(words, f"{_INDENT}      ", hang=9)
    return lines


def _price_words(price: Price) -> str:
    peak, peak_now = price.peak_bytes / _GIB, price.peak_bytes_now / _GIB
    memory = f"{peak:.3g} GiB instead of {peak_now:.3g} GiB per GPU"
    if price.step_seconds is None or not price.step_seconds_now:
        return memory
    change = price.step_seconds / price.step_seconds_now - 1
    return f"step {change:+.1%}, {memory}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


def _labelled(label: str, text: str) -> list[str]:
    return _paragraph(text, f"{_INDENT}{label:<6}", hang=9)


def _entry(label: str, text: str) -> list[str]:
    return _paragraph(text, f"{label:<{_MARGIN}}", hang=_MARGIN)


def _paragraph(text: str, first: str, *, hang: int) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
