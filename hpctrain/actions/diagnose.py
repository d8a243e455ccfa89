"""`diagnose`: why a run is as fast as it is, from its directory alone, and what would change it.

Belongs here: reading what the judges ask for, and having the planner price the changes that they
name. Does not belong here: judging (`hpctrain.diagnose`), text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.prepare import load_inputs, load_knowledge
from hpctrain.actions.run_documents import known_plan
from hpctrain.actions.runs import RunFiles
from hpctrain.diagnose.facts import Facts, Planned, RankFacts, SaveFacts, StepFacts
from hpctrain.diagnose.findings import Finding, Price, Remedy
from hpctrain.diagnose.judge import judge, shares
from hpctrain.errors import HpctrainError, InvalidInputError, UsageError
from hpctrain.plan.documents import Plan
from hpctrain.store.layout import RunLayout
from hpctrain.store.run_records import (
    RankTimes,
    SaveRecord,
    StepMetrics,
    read_metrics,
    read_record,
    read_saves,
)
from hpctrain.telemetry.traces import TraceSummary, read_trace, trace_files

# Traces of several ranks say who waits for whom; more of them say the same once more.
MOST_TRACES = 4
# Changes are priced one after the other, each by a search of its own.
_MOST_PRICES = 10
_WORTH = 0.01


class Read(BaseModel):
    """A file that was read, and how much of it."""

    model_config = ConfigDict(frozen=True)

    file: str
    words: str


class Diagnosis(BaseModel):
    """Everything that `hpctrain diagnose` tells. `shares`: of a step, by part, of the middle rank;
    `predicted_seconds`: the plan's step. `findings`: what stands out first, by gain."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    step_seconds: float | None
    predicted_seconds: float | None
    ranks: int
    nodes: int
    shares: dict[str, float]
    read: tuple[Read, ...]
    findings: tuple[Finding, ...]

    @property
    def stands_out(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.answer == "yes")


def diagnose(run: RunFiles, *, price: bool = True) -> Diagnosis:
    """Judge a run by what lies in its directory; `price`: ask the planner about changes.

    Raises UsageError when the run has not finished a step yet.
    """
    facts, read = gather(run)
    if facts.steps is None and facts.ranks is None:
        raise UsageError(
            f"run `{run.run_id}` has not finished a step yet: there is nothing to judge",
            hint="`hpctrain why` says what it waits for",
        )
    findings = judge(facts)
    if price and facts.planned is not None:
        findings = _Pricing(run.layout, facts.planned.plan).of_all(findings)
    planned = facts.planned.plan if facts.planned else None
    return Diagnosis(
        run_id=run.run_id,
        step_seconds=facts.step_seconds,
        predicted_seconds=planned.step_seconds if planned else None,
        ranks=len(facts.ranks.compute) if facts.ranks else 0,
        nodes=len(set(facts.ranks.nodes)) if facts.ranks else 0,
        shares=shares(facts),
        read=read,
        findings=findings,
    )


def gather(run: RunFiles) -> tuple[Facts, tuple[Read, ...]]:
    """Everything that the run directory tells; what cannot be read is left out."""
    layout = run.layout
    rows, times = read_metrics(layout), read_record(layout.rank_times, RankTimes)
    planned, traces = _planned(layout), _traces(layout)
    saves = read_saves(layout)
    read = []
    if times is not None:
        words = f"{len(times.compute_seconds)} ranks, steps {times.first_step} to {times.last_step}"
        read.append(Read(file="ranks.json", words=words))
    read.append(Read(file="metrics.jsonl", words=f"{len(rows)} steps"))
    read.append(Read(file="saves.jsonl", words=f"{len(saves)} saves"))
    if planned is None:
        read.append(Read(file="plan.json", words="not readable"))
    read += [Read(file=f"traces/{one.file}", words=_extent(one)) for one in traces]
    left = len(trace_files(layout.traces)) - len(traces)
    if left > 0:
        read.append(Read(file="traces", words=f"{left} more were not read"))
    facts = Facts(
        run_id=run.run_id,
        ranks=None if times is None else _ranks(times),
        steps=_steps(rows),
        saves=_saves(saves, {(row.epoch, row.step) for row in _last_rows(rows)}, planned),
        planned=planned,
        traces=tuple(traces),
    )
    return facts, tuple(read)


def _extent(trace: TraceSummary) -> str:
    steps = f"{trace.steps[0]}" if len(trace.steps) == 1 else f"{trace.steps[0]}-{trace.steps[-1]}"
    rest = "" if trace.whole else ", not the whole file"
    return f"rank {trace.rank}, steps {steps}, {trace.events:,} events{rest}"


def _traces(layout: RunLayout) -> list[TraceSummary]:
    """Of the newest launch that has any."""
    found: list[TraceSummary] = []
    for path in trace_files(layout.traces)[:MOST_TRACES]:
        summary = read_trace(path)
        if summary is not None and (not found or summary.epoch == found[0].epoch):
            found.append(summary)
    return found


def _planned(layout: RunLayout) -> Planned | None:
    try:
        spec, profile = load_inputs(layout.spec, str(layout.profile.absolute()))
    except (OSError, InvalidInputError):
        return None
    plan = known_plan(layout)
    return Planned(spec.document, profile.document, plan) if plan is not None else None


def _ranks(times: RankTimes) -> RankFacts:
    return RankFacts(
        epoch=times.epoch,
        first_step=times.first_step,
        last_step=times.last_step,
        nodes=times.nodes,
        compute=times.compute_seconds,
        backward=times.backward_seconds,
        data=times.data_seconds,
        optimizer=times.optimizer_seconds,
        step=times.step_seconds,
        rest=times.rest_seconds,
        peak_bytes=times.peak_memory_bytes,
        reserved_bytes=times.reserved_memory_bytes,
    )


def _steps(rows: Sequence[StepMetrics]) -> StepFacts | None:
    if not rows:
        return None
    launches: dict[int, list[StepMetrics]] = {}
    for row in rows:
        launches.setdefault(row.epoch, []).append(row)
    usual = [
        row for own in launches.values() for row in own[1:] if not row.profiled
    ]  # a first step connects, compiles and warms up
    newest = [row for row in launches[rows[-1].epoch][1:] if not row.profiled]
    middle = median(row.step_seconds for row in usual) if usual else 0.0
    lost = sum(max(0.0, own[0].step_seconds - middle) for own in launches.values()) if usual else 0
    return StepFacts(
        launches=len(launches),
        usual=tuple((row.step, row.step_seconds) for row in newest),
        lost_seconds=float(lost),
        all_seconds=sum(row.step_seconds for row in rows),
    )


def _last_rows(rows: Sequence[StepMetrics]) -> list[StepMetrics]:
    """The last step of each launch."""
    return list({row.epoch: row for row in rows}.values())


def _saves(
    saves: Sequence[SaveRecord], last: set[tuple[int, int]], planned: Planned | None
) -> SaveFacts | None:
    stalls = [save.stall_seconds for save in saves if (save.epoch, save.step) not in last]
    if not stalls:
        return None
    asynchronous = planned is None or planned.spec.checkpoint.asynchronous
    return SaveFacts(len(stalls), sum(stalls), asynchronous)


@dataclass
class _Pricing:
    """Has the planner plan anew with each change, as `hpctrain plan --set` would."""

    layout: RunLayout
    now: Plan
    left: int = _MOST_PRICES

    def of_all(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        return tuple(one.model_copy(update={"remedies": self._priced(one)}) for one in findings)

    def _priced(self, finding: Finding) -> tuple[Remedy, ...]:
        """Without changes that are not possible or bring nothing; what is done about memory by
        what it costs."""
        told = [self._with_price(one) for one in finding.remedies]
        memory = finding.topic == "memory"
        kept = [one for one in told if one is not None and is_worth_it(one.price, memory=memory)]
        if memory:
            kept.sort(key=_by_time)
        return tuple(kept)

    def _with_price(self, remedy: Remedy) -> Remedy | None:
        planned = remedy.changes and not remedy.changes[0].startswith(
            ("supervise.", "checkpoint.", "environment.", "resources.")
        )
        if not planned or self.left <= 0:
            return remedy
        self.left -= 1
        try:
            plan = _plan_with(self.layout, remedy.changes)
        except HpctrainError:
            return None
        peak, peak_now = _peak(plan), _peak(self.now)
        price = Price(
            step_seconds=plan.step_seconds,
            step_seconds_now=self.now.step_seconds,
            peak_bytes=peak,
            peak_bytes_now=peak_now,
        )
        return remedy.model_copy(update={"price": price})


def is_worth_it(price: Price | None, *, memory: bool) -> bool:
    """False when the planner sees nothing in it: neither time, nor (`memory`) memory."""
    if price is None:
        return True
    if memory and price.peak_bytes < (1 - _WORTH) * price.peak_bytes_now:
        return True
    if price.step_seconds is None or price.step_seconds_now is None:
        return not memory
    return price.step_seconds < (1 - _WORTH) * price.step_seconds_now


def _plan_with(layout: RunLayout, changes: Sequence[str]) -> Plan:
    from hpctrain.plan.planner import make_plan  # with NumPy, which only planning needs

    spec, profile = load_inputs(layout.spec, str(layout.profile.absolute()), changes)
    return make_plan(spec.document, profile.document, load_knowledge(profile))


def _peak(plan: Plan) -> int:
    return plan.memory[plan.peak_stage].total_bytes


def _by_time(remedy: Remedy) -> float:
    """Seconds that the step gets longer; what has no price first, for it costs nothing."""
    price = remedy.price
    if price is None:
        return float("-inf")
    if price.step_seconds is None or price.step_seconds_now is None:
        return 0.0
    return price.step_seconds - price.step_seconds_now
