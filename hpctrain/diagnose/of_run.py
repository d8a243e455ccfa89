"""Diagnoses why a run is as fast as it is, from its directory alone, and prices changes.

Belongs here: reading the inputs of the judges, and pricing the changes that they propose. Does not
belong here: judging (`hpctrain.diagnose`), text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hpctrain.base.errors import HpctrainError, InvalidInputError, UsageError
from hpctrain.base.frozen import Frozen
from hpctrain.diagnose.facts import (
    AxisFacts,
    DiagnosisInput,
    MessageFacts,
    Planned,
    Price,
    SaveFacts,
    SpeedFacts,
    StepFacts,
    Suggestion,
    TopicFinding,
)
from hpctrain.diagnose.judge import judge, shares
from hpctrain.job.prepare import load_inputs, load_knowledge
from hpctrain.plan.documents import Plan
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    CommunicationRecord,
    RankTimes,
    StepMetrics,
    read_communication,
    read_metrics,
    read_record,
    read_saves,
)
from hpctrain.records.speed_checks import SpeedCheck, read_speed_checks
from hpctrain.runs.run_documents import known_any_plan, reports_steps
from hpctrain.telemetry.traces import TraceSummary, read_trace, trace_files

# Traces of several ranks show which rank waits for which; more of them show the same.
MOST_TRACES = 4
# Each price needs a search, and they run one after the other.
_MOST_PRICES = 10
_WORTH = 0.01
# Of a trainer of its own other answers are not told while they are unknown, which most stay.
_OF_ANY_TRAINER = frozenset({"warm_up", "unsteady"})


class ReadFile(Frozen):
    """A file that was read, and how much of it."""

    file: str
    words: str


class Diagnosis(Frozen):
    """The output of `hpctrain diagnose`.

    `shares` are parts of a step of the middle rank; `predicted_seconds` is the plan's step.
    `findings` that stand out come first, ordered by gain.
    """

    run_id: str
    step_seconds: float | None
    predicted_seconds: float | None
    ranks: int
    nodes: int
    shares: dict[str, float]
    read: tuple[ReadFile, ...]
    findings: tuple[TopicFinding, ...]

    @property
    def stands_out(self) -> tuple[TopicFinding, ...]:
        return tuple(one for one in self.findings if one.answer == "yes")


def diagnose(
    run: RunFiles, *, price: bool = True, rows: Sequence[StepMetrics] | None = None
) -> Diagnosis:
    """Judge a run by the files in its directory; `price`: let the planner price changes.

    `rows`: its metrics, if they have been read already. Raises UsageError when the run has not
    finished a step yet.
    """
    plan = known_any_plan(run.layout)
    facts, read = gather(run, rows)
    if facts.steps is None and facts.ranks is None:
        if not reports_steps(plan):
            raise UsageError(
                f"run `{run.run_id}` has a trainer of its own that does not report its steps: "
                "there is nothing to judge",
                hint="`trainer.metrics` in the spec says where they are found; `hpctrain goodput` "
                "shows where the time went",
            )
        raise UsageError(
            f"run `{run.run_id}` has not finished a step yet: there is nothing to judge",
            hint="`hpctrain why` shows what it waits for",
        )
    findings = judge(facts)
    if isinstance(plan, TrainerPlan):  # whose remedies nobody knows
        findings = tuple(
            one.model_copy(update={"remedies": ()})
            for one in findings
            if one.answer != "unknown" or one.topic in _OF_ANY_TRAINER
        )
    if price and facts.planned is not None:
        findings = _Pricing(run.layout, facts.planned.plan).of_all(findings)
    planned = facts.planned.plan if facts.planned else None
    return Diagnosis(
        run_id=run.run_id,
        step_seconds=facts.step_seconds,
        predicted_seconds=planned.step_seconds if planned else None,
        ranks=len(facts.ranks.compute_seconds) if facts.ranks else 0,
        nodes=len(set(facts.ranks.nodes)) if facts.ranks else 0,
        shares=shares(facts),
        read=read,
        findings=findings,
    )


def gather(
    run: RunFiles, rows: Sequence[StepMetrics] | None = None
) -> tuple[DiagnosisInput, tuple[ReadFile, ...]]:
    """Read all facts of the run directory; files that cannot be read are left out.

    `rows`: its metrics, if they have been read already.
    """
    layout = run.layout
    rows = read_metrics(layout) if rows is None else rows
    times = read_record(layout.rank_times, RankTimes)
    try:
        planned, plan = None, known_any_plan(layout)
        if isinstance(plan, Plan):
            spec, profile = load_inputs(layout.spec, str(layout.profile.absolute()))
            planned = Planned(spec.document, profile.document, plan)
    except (OSError, InvalidInputError):
        planned = plan = None
    unplanned = "not readable"
    if planned is not None and (ramp_steps := planned.plan.batch.ramp_steps):
        rows = [row for row in rows if row.step > ramp_steps] or rows
        if not rows or rows[-1].step <= ramp_steps:
            planned, unplanned = None, "of larger steps than these: the batch still grows"
        elif times is not None and times.first_step <= ramp_steps:
            times = None
    traces: list[TraceSummary] = []  # of the newest launch that has any
    for path in trace_files(layout.traces)[:MOST_TRACES]:
        summary = read_trace(path)
        if summary is not None and (not traces or summary.epoch == traces[0].epoch):
            traces.append(summary)
    saves = read_saves(layout)
    read = []
    if times is not None:
        extent = f"{len(times.compute_seconds)} ranks"
        extent = f"{extent}, steps {times.first_step} to {times.last_step}"
        read.append(ReadFile(file="ranks.json", words=extent))
    read.append(ReadFile(file="metrics.jsonl", words=f"{len(rows)} steps"))
    read.append(ReadFile(file="saves.jsonl", words=f"{len(saves)} saves"))
    if planned is None and not isinstance(plan, TrainerPlan):
        read.append(ReadFile(file="plan.json", words=unplanned))
    for one in traces:
        first, last = one.steps[0], one.steps[-1]
        steps = f"{first}" if len(one.steps) == 1 else f"{first}-{last}"
        rest = "" if one.whole else ", not the whole file"
        extent = f"rank {one.rank}, steps {steps}, {one.events:,} events{rest}"
        read.append(ReadFile(file=f"traces/{one.file}", words=extent))
    measured = read_communication(layout)
    if measured is not None:
        extent = f"{len(measured.nodes)} ranks, step {measured.step}"
        read.append(ReadFile(file="communication.json", words=extent))
    checks = read_speed_checks(layout)
    if checks:
        extent = f"launch {checks[-1].epoch}, {len(checks[-1].nodes)} ranks"
        read.append(ReadFile(file="speed.jsonl", words=extent))
    left = len(trace_files(layout.traces)) - len(traces)
    if left > 0:
        read.append(ReadFile(file="traces", words=f"{left} more were not read"))
    # The stalls of all saves but the last of each launch.
    last_steps = {row.epoch: row.step for row in rows}
    counted = (s.stall_seconds for s in saves if last_steps.get(s.epoch) != s.step)
    stalls = [seconds for seconds in counted if seconds is not None]
    asynchronous = planned is None or planned.spec.checkpoint.asynchronous
    facts = DiagnosisInput(
        run_id=run.run_id,
        ranks=times,
        steps=_steps(rows),
        saves=SaveFacts(len(stalls), sum(stalls), asynchronous) if stalls else None,
        planned=planned,
        traces=tuple(traces),
        speed=_speed(checks[-1]) if checks else None,
        messages=None if measured is None else _messages(measured),
    )
    return facts, tuple(read)


def _speed(check: SpeedCheck) -> SpeedFacts:
    certain = dict.fromkeys(node for part in check.slow if part.certain for node in part.nodes)
    slow = tuple(part.message for part in check.slow)
    return SpeedFacts(check.epoch, len(check.nodes), slow, tuple(certain), check.far_ranks)


def _messages(record: CommunicationRecord) -> MessageFacts:
    """Sum up each axis; ranks that send nothing along it are left out."""
    axes = [
        AxisFacts(
            axis=one.axis,
            calls=max(one.calls),
            most_bytes=max(one.bytes),
            seconds=min(s for s, calls in zip(one.seconds, one.calls, strict=True) if calls),
        )
        for one in record.axes
    ]
    return MessageFacts(record.step, record.step_seconds, tuple(axes))


def _steps(rows: Sequence[StepMetrics]) -> StepFacts | None:
    if not rows:
        return None
    launches: dict[int, list[StepMetrics]] = {}
    for row in rows:
        launches.setdefault(row.epoch, []).append(row)

    def usual_of(own: Sequence[StepMetrics]) -> list[tuple[int, float]]:
        """The steps whose time is known, without the first, which connects and compiles."""
        return [
            (row.step, row.step_seconds)
            for row in own[1:]
            if not row.profiled and row.step_seconds is not None
        ]

    usual = [seconds for own in launches.values() for _, seconds in usual_of(own)]
    middle = median(usual) if usual else 0.0
    first = [own[0].step_seconds or 0.0 for own in launches.values()]
    return StepFacts(
        launches=len(launches),
        usual=tuple(usual_of(launches[rows[-1].epoch])),
        lost_seconds=sum(max(0.0, seconds - middle) for seconds in first) if usual else 0.0,
        all_seconds=sum(row.step_seconds or 0.0 for row in rows),
    )


@dataclass
class _Pricing:
    """Prices each change by a new plan, as `hpctrain plan --set` would."""

    layout: RunLayout
    now: Plan
    left: int = _MOST_PRICES

    def of_all(self, findings: Sequence[TopicFinding]) -> tuple[TopicFinding, ...]:
        """Price all remedies, and drop those that are impossible or bring nothing.

        Remedies for memory are ordered by the time that they cost.
        """
        priced = []
        for finding in findings:
            memory = finding.topic == "memory"
            remedies = [one for one in map(self._with_price, finding.remedies) if one is not None]
            worthy = [one for one in remedies if is_worth_it(one.price, memory=memory)]
            if memory:
                worthy.sort(key=_slowdown_seconds)
            priced.append(finding.model_copy(update={"remedies": tuple(worthy)}))
        return tuple(priced)

    def _with_price(self, remedy: Suggestion) -> Suggestion | None:
        """Price one remedy; None if it cannot be planned."""
        planned = remedy.changes and not remedy.changes[0].startswith(
            ("supervise.", "checkpoint.", "environment.", "resources.")
        )
        if not planned or self.left <= 0:
            return remedy
        from hpctrain.plan.planner import make_plan  # with NumPy, which only planning needs

        self.left -= 1
        try:
            profile_path = str(self.layout.profile.absolute())
            spec, profile = load_inputs(self.layout.spec, profile_path, remedy.changes)
            plan = make_plan(spec.document, profile.document, load_knowledge(profile))
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
    """Return False if the plan with it saves neither time nor (`memory`) memory."""
    if price is None:
        return True
    if memory and price.peak_bytes < (1 - _WORTH) * price.peak_bytes_now:
        return True
    if price.step_seconds is None or price.step_seconds_now is None:
        return not memory
    return price.step_seconds < (1 - _WORTH) * price.step_seconds_now


def _peak(plan: Plan) -> int:
    return plan.memory[plan.peak_stage].total_bytes


def _slowdown_seconds(remedy: Suggestion) -> float:
    """Return how much longer a step gets; -inf without a price, because it costs nothing."""
    price = remedy.price
    if price is None:
        return float("-inf")
    if price.step_seconds is None or price.step_seconds_now is None:
        return 0.0
    return price.step_seconds - price.step_seconds_now
