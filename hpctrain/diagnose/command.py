"""`diagnose`: why a run is as fast as it is, in lines of at most 80 columns.

Does not belong here: the answers (`judge`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.base.units import short_bytes
from hpctrain.page.options import RunName, json_option, runs_option
from hpctrain.page.output import json_out
from hpctrain.page.text import facts, paragraph
from hpctrain.page.words import words_of

if TYPE_CHECKING:
    from hpctrain.diagnose.facts import Price, TopicFinding
    from hpctrain.diagnose.of_run import Diagnosis


@click.command()
@click.argument("run", type=RunName())
@click.option("--no-prices", is_flag=True, help="Do not predict the effect of changes.")
@runs_option
@json_option
def diagnose(run: str, no_prices: bool, runs: Path | None, as_json: bool) -> None:
    """Say what a run's steps and its memory go into, what stands out, and what to change
    first, by gain: data loading, communication, slow ranks, the pipeline, gradient
    buckets, memory, saves, starts.

    Reads the run directory only: times of all ranks, metrics, saves, plan, and traces
    where the spec asked for some, as with  --set 'profile.steps=[50, 51]'

    \b
    Examples:
      hpctrain diagnose gpt175b-7f3a
      hpctrain diagnose gpt175b-7f3a --json
    """
    from hpctrain.diagnose.of_run import diagnose as judge
    from hpctrain.records.find import find_run, runs_directory

    diagnosis = judge(find_run(runs_directory(runs), run), price=not no_prices)
    if as_json:
        json_out("diagnose", diagnosis)
        return
    for line in diagnosis_lines(diagnosis):
        click.echo(line)


# ----------------------------------------------------------------------------------------------
# Formats a diagnosis in lines of at most 80 columns: what stands out first, the rest in brief.


_MARGIN, _INDENT = 8, "   "


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """Format the run, its step, each finding with evidence and remedies, then what is fine."""
    ranks = f", {diagnosis.ranks} rank{'s' * (diagnosis.ranks > 1)}" if diagnosis.ranks else ""
    nodes = (
        f" on {diagnosis.nodes} node{'s' * (diagnosis.nodes > 1)}"
        if ranks and diagnosis.nodes
        else ""
    )
    named = [("Run", f"{diagnosis.run_id}{ranks}{nodes}")]
    if diagnosis.step_seconds is not None:
        planned = diagnosis.predicted_seconds
        beside = "no prediction" if planned is None else f"the plan said {_seconds(planned)}"
        named.append(("Step", f"{_seconds(diagnosis.step_seconds)}; {beside}"))
    if diagnosis.shares:
        shares = " · ".join(f"{name} {share:.0%}" for name, share in diagnosis.shares.items())
        named.append(("Parts", f"{shares} (the middle rank)"))
    named.append(("Read", " · ".join(f"{one.file}: {one.words}" for one in diagnosis.read)))
    lines = facts(*named, margin=_MARGIN)
    for number, finding in enumerate(diagnosis.stands_out, 1):
        lines += ["", *_finding_lines(number, finding, diagnosis.step_seconds)]
    if not diagnosis.stands_out:
        lines += ["", "Nothing stands out."]
    for answer, head in (("no", "Fine"), ("unknown", "Unknown")):
        rest = [one for one in diagnosis.findings if one.answer == answer]
        if rest:
            lines += ["", head]
        named = [(f"  {words_of(one.topic)}", one.words) for one in rest]
        lines += facts(*named, margin=17)
    return lines


def _finding_lines(number: int, finding: TopicFinding, step_seconds: float | None) -> list[str]:
    named = []
    if finding.gain_seconds is not None and step_seconds:
        bound = "at least" if finding.at_least else "at most"
        share = finding.gain_seconds / step_seconds
        named.append(("gain", f"{bound} {_seconds(finding.gain_seconds)} a step ({share:.0%})"))
    named += [("seen", f"{proof.words} [{proof.source}]") for proof in finding.evidence]
    for remedy in finding.remedies:
        price = "" if remedy.price is None else f"; the plan then: {_price_text(remedy.price)}"
        named.append(("do", f"{remedy.words}{price}"))
        named.append(("", " ".join(f"--set {change}" for change in remedy.changes)))
    lines = paragraph(f"{finding.question} Yes: {finding.words}.", f"{number}. ")
    return lines + facts(*((f"{_INDENT}{name}", text) for name, text in named), margin=9)


def _price_text(price: Price) -> str:
    """Compare the predicted step and memory with those of the present plan."""
    peak, peak_now = short_bytes(price.peak_bytes), short_bytes(price.peak_bytes_now)
    memory = f"{peak} instead of {peak_now} per GPU"
    if price.step_seconds is None or not price.step_seconds_now:
        return memory
    change = price.step_seconds / price.step_seconds_now - 1
    return f"step {change:+.1%}, {memory}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"
