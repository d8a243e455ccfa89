"""Plans one spec on one profile, or on several numbers of GPUs.

Belongs here: loading, measuring the search, combining plan and forecast, choosing among sizes,
advice, and writing the layout into a spec. Does not belong here: planning itself
(`hpctrain.plan`), text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from io import StringIO
from pathlib import Path
from typing import Any

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import (
    DoesNotFitError,
    HpctrainError,
    InvalidInputError,
    LimitError,
    RefusedPlanError,
    UsageError,
)
from hpctrain.job.prepare import load_inputs, load_knowledge
from hpctrain.plan.alternatives import explain
from hpctrain.plan.documents import Explanation, Goal, Plan
from hpctrain.plan.forecast.documents import (
    Budget,
    BudgetDecision,
    Forecast,
    RunFacts,
    SpotComparison,
)
from hpctrain.plan.forecast.options import (
    cheapest_plan,
    check_currency,
    compare_spot,
    days,
    days_range,
)
from hpctrain.plan.forecast.predict import run_facts
from hpctrain.plan.job import TrainerJob, TrainingJob
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.plan.limits import usable_gpus
from hpctrain.plan.planner import Decision, decide
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.simulate.forecasts import forecast_run
from hpctrain.spec.document import Document
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


@dataclass(frozen=True)
class Inputs:
    """Documents that are loaded once for any number of plans; `source` knows places in the file."""

    spec: RunSpec
    profile: ClusterProfile
    knowledge: Knowledge
    source: Loaded[RunSpec] | None = None

    def placed(self, refusal: HpctrainError) -> HpctrainError:
        """Return a refusal with the places of its fields, where the spec's file is known."""
        if self.source is None or not isinstance(refusal, RefusedPlanError):
            return refusal
        return refusal.at(self.source.problem)


@dataclass(frozen=True)
class Option:
    """One number of GPUs: the decision, the time of the search, and the forecast.

    `refusal` is the reason for a missing plan, `remark` that for a missing forecast.
    """

    gpus: int
    decision: Decision | None = None
    search_seconds: float = 0.0
    forecast: Forecast | None = None
    refusal: HpctrainError | None = None
    remark: str | None = None

    @property
    def plan(self) -> Plan | None:
        return self.decision.plan if self.decision else None


def load(spec: Path, profile: str, overrides: Sequence[str] = ()) -> Inputs:
    """Read everything. Raises InvalidInputError with the problems of both files at once."""
    loaded_spec, loaded_profile = load_inputs(spec, profile, overrides)
    knowledge = load_knowledge(loaded_profile)
    return Inputs(loaded_spec.document, loaded_profile.document, knowledge, loaded_spec)


def plan_option(
    inputs: Inputs, goal: Goal, gpus: int | None = None, before_seconds: float = math.inf
) -> Option:
    """Plan on `gpus` GPUs (default: those of the spec), or record why that is impossible.

    No forecast is made of a plan that trains for longer than `before_seconds`.
    """
    spec = inputs.spec if gpus is None else with_gpus(inputs.spec, gpus)
    start = time.perf_counter()
    try:
        decision = decide(PlanRequest(spec, inputs.profile, inputs.knowledge, goal))
    except (DoesNotFitError, LimitError) as error:
        return Option(spec.resources.gpus, refusal=error)
    seconds = time.perf_counter() - start
    facts = run_facts(decision.job)
    if facts is None or facts.training_seconds > before_seconds:
        return Option(spec.resources.gpus, decision, seconds)
    try:
        predicted = forecast_run(decision.job, facts)
    except DoesNotFitError as error:
        return Option(spec.resources.gpus, decision, seconds, remark=str(error))
    return Option(spec.resources.gpus, decision, seconds, predicted)


def explanation(inputs: Inputs, option: Option, goal: Goal, top: int) -> Explanation:
    """Explain why the plan of `option` wins.

    A layout that the spec gives is compared with the one that `parallel: auto` would choose. Raises
    what planning raises.
    """
    decision = option.decision
    assert decision is not None
    if decision.request.spec.parallel == "auto":
        explained = explain(decision, top)
        return explained.model_copy(update={"search_seconds": option.search_seconds})
    free = decision.request.spec.model_copy(update={"parallel": "auto"})
    start = time.perf_counter()
    other = decide(PlanRequest(free, inputs.profile, inputs.knowledge, goal))
    seconds = time.perf_counter() - start
    explained = explain(other, top, given=decision.found.candidate(decision.row))
    return explained.model_copy(update={"search_seconds": seconds})


def freed(spec: RunSpec, given: Sequence[str] = ()) -> RunSpec:
    """Leave layout and micro-batch to the search, but for the fields `given` by `--set`."""
    changes: dict[str, object] = {}
    if not any(field.partition(".")[0] == "parallel" for field in given):
        changes["parallel"] = "auto"
    if "batch.micro" not in given:
        changes["batch"] = spec.batch.model_copy(update={"micro": "auto"})
    return spec.model_copy(update=changes)


def with_gpus(spec: RunSpec, gpus: int) -> RunSpec:
    """Copy a spec with another number of GPUs."""
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"gpus": gpus})})


def spot_comparison(inputs: Inputs, option: Option, budget: Budget | None) -> SpotComparison | None:
    """Compare spot with on demand for one option; None without spot price or forecast."""
    if option.decision is None or option.forecast is None:
        return None
    facts = run_facts(option.decision.job)
    assert facts is not None
    return compared_tariffs(option.decision.job, facts, option.forecast, budget)


def compared_tariffs(
    job: TrainingJob | TrainerJob, facts: RunFacts, known: Forecast, budget: Budget | None
) -> SpotComparison | None:
    """Compare spot with on demand; `known` is the forecast of one of them."""

    def predict(facts: RunFacts) -> Forecast:
        same = facts.spot is (known.tariff == "spot")
        return known if same else forecast_run(job, facts)

    try:
        return compare_spot(job.spec, job.profile, facts, budget, predict)
    except DoesNotFitError:
        return None


def sizes_to_try(inputs: Inputs) -> tuple[int, ...]:
    """List halvings and doublings of the requested GPUs, in whole nodes, up to a run's limit."""
    wanted, per_node = inputs.spec.resources.gpus, inputs.profile.gpu.per_node
    limit = usable_gpus(inputs.spec, inputs.profile)
    smaller = [wanted >> n for n in range(wanted.bit_length()) if wanted % 2**n == 0]
    larger = [wanted << n for n in range(1, 12) if wanted << n <= limit]
    sizes = sorted({*smaller, *larger})
    return tuple(n for n in sizes if n <= limit and (n <= per_node or n % per_node == 0))


def best_option(options: Sequence[Option], goal: Goal) -> Option:
    """Choose the option to show: it ends first, has the fewest GPU-hours, or most free memory.

    Where some have no forecast, the steps of all are compared.
    Raises the refusal of the last option when no size has a plan.
    """
    planned = [option for option in options if option.plan is not None]
    if not planned:
        refusal = options[-1].refusal
        assert refusal is not None
        raise refusal

    known = all(option.forecast is not None for option in planned)

    def cost(option: Option) -> float:
        plan, forecast = option.plan, option.forecast
        assert plan is not None
        if known and forecast is not None and goal != "memory":
            return forecast.gpu_hours if goal == "gpu-hours" else forecast.days
        if goal == "memory" or plan.step_seconds is None:
            return float(max(stage.total_bytes for stage in plan.memory))
        return plan.step_seconds * (option.gpus if goal == "gpu-hours" else 1)

    return min(planned, key=cost)


def within_budget(
    inputs: Inputs, options: Sequence[Option], budget: Budget
) -> tuple[BudgetDecision, Option]:
    """Choose the cheapest option that meets the budget, on demand or spot; else the nearest.

    Raises UsageError for a currency that the profile does not have or where no option has a
    forecast.
    """
    check_currency(budget, inputs.profile)
    priced: list[tuple[Forecast, Option]] = []
    for option in options:
        comparison = spot_comparison(inputs, option, budget)
        forecasts = [option.forecast, comparison.spot if comparison else None]
        forecasts += [comparison.on_demand] if comparison else []
        for one in {f.tariff: f for f in forecasts if f is not None}.values():
            priced.append((one, option))
    if not priced:
        reason = next((str(o.refusal or o.remark) for o in options if o.refusal or o.remark), "")
        raise UsageError(
            "--budget and --deadline need a predicted step time, and there is none",
            hint=reason or "add `gpu.peak` and `gpu.memory_bandwidth` to the profile",
        )
    decision = cheapest_plan([one for one, _ in priced], budget)
    chosen, option = priced[decision.nearest if decision.chosen is None else decision.chosen]
    return decision, replace(option, forecast=chosen, refusal=None)


# -- Writes a planned layout into the YAML of its spec; comments and order of the file stay -----


# (mapping, sequence, offset) as files are indented; the one that changes fewest lines is taken.
_INDENTS = tuple(
    (mapping, sequence, offset)
    for mapping in (2, 4)
    for sequence, offset in ((2, 0), (4, 2), (4, 0), (6, 4))
)
_WIDTH = 4096  # a long line stays one


def chosen_fields(option: Option) -> dict[str, Any]:
    """Return what the plan has decided, by the fields of the spec."""
    decision = option.decision
    assert decision is not None
    candidate = decision.found.candidate(decision.row)
    given = candidate.parallel.model_dump(mode="json", exclude_defaults=True)
    if given.get("order") == DEFAULT_ORDER:
        del given["order"]
    if given.get("sequence_parallel") == (candidate.layout.tp > 1):
        del given["sequence_parallel"]
    axes = {"tp": candidate.layout.tp, "pp": candidate.layout.pp}
    return {
        "parallel": {**axes, **given},
        "batch": {"micro": candidate.micro_batch},
        "resources": {"gpus": option.gpus},
    }


def apply_plan(spec: Path, profile: str, option: Option, overrides: Sequence[str] = ()) -> str:
    """Write layout, micro-batch and number of GPUs of `option` into the file.

    Returns a sentence about it. Raises UsageError for a spec that is not a file that can be
    written; and, with the file as it was, UsageError where only `overrides` make it plan so, and
    HpctrainError if it would not plan the same for another reason.
    """
    if str(spec) == "-" or not spec.is_file():
        raise UsageError(f"--apply writes into a file, and {spec} is none")
    before = spec.read_text(encoding="utf-8")
    fields = chosen_fields(option)
    after = changed_text(before, fields)
    changes = [*_changes(_read(before), fields)]
    if not changes:
        return f"{spec} has this layout already"
    target = spec.resolve()
    mode = target.stat().st_mode & 0o777
    try:
        replace_text(target, after, mode=mode)
    except OSError as error:
        raise UsageError(f"--apply: {spec} cannot be written: {error.strerror}") from error
    try:
        _check_written(spec, profile, option, overrides)
    except HpctrainError:
        replace_text(target, before, mode=mode)
        raise
    return f"{spec}: wrote {', '.join(f'`{change}`' for change in changes)}"


def _check_written(spec: Path, profile: str, option: Option, overrides: Sequence[str]) -> None:
    """Raise UsageError or HpctrainError unless the file plans as `option`, also on its own."""
    again = plan_option(load(spec, profile, overrides), "time")
    if again.plan is None or option.plan is None or again.plan.layout != option.plan.layout:
        raise HpctrainError(f"{spec} is unchanged: it would plan {again.plan or again.refusal}")
    absent = [name for one in overrides if not _is_written(name := one.partition("=")[0])]
    if not absent:
        return
    try:
        alone = plan_option(load(spec, profile), "time")
        if alone.plan is not None and _figures(alone.plan) == _figures(again.plan):
            return
        reason = str(alone.refusal or "it would plan other batches or another memory")
    except InvalidInputError as error:
        reason = str(error)
    named = " and ".join(f"`--set {name}`" for name in absent)
    hint = f"{named} {'is' if len(absent) == 1 else 'are'} not in the file: write it there first"
    raise UsageError(f"{spec} is unchanged: without {named}, {reason}", hint=hint)


def _is_written(field: str) -> bool:
    return field.partition(".")[0] == "parallel" or field in ("batch.micro", "resources.gpus")


def _figures(plan: Plan) -> tuple[object, ...]:
    return plan.layout, plan.batch, plan.memory


def changed_text(text: str, fields: Mapping[str, Any]) -> str:
    """Return the YAML `text` with `fields`, and with as few other changes as possible."""
    written = [_written(text, fields, indent) for indent in _INDENTS]

    def kept(other: str) -> int:
        matcher = SequenceMatcher(None, text.splitlines(), other.splitlines(), autojunk=False)
        return sum(block.size for block in matcher.get_matching_blocks())

    return max(written, key=kept)


def _written(text: str, fields: Mapping[str, Any], indent: tuple[int, int, int]) -> str:
    from ruamel.yaml import YAML

    # ruamel's round trip keeps tags as text and makes no objects of them.
    round_trip, stream = YAML(typ="rt", pure=True), StringIO()
    round_trip.preserve_quotes, round_trip.width = True, _WIDTH
    round_trip.indent(mapping=indent[0], sequence=indent[1], offset=indent[2])
    document = round_trip.load(text)
    _update(document, fields)
    round_trip.dump(document, stream)
    return stream.getvalue()


def _update(document: Any, fields: Mapping[str, Any]) -> None:
    """Set every field; a layout replaces all keys of the one before."""
    for name, value in fields.items():
        inner = document.get(name)
        if not isinstance(value, Mapping):
            if inner != value:
                document[name] = value
        elif not hasattr(inner, "get"):
            document[name] = dict(value)
        else:
            if name == "parallel":
                for gone in [key for key in inner if key not in value]:
                    del inner[gone]
            _update(inner, value)


def _changes(document: Any, fields: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield `parallel.tp 4` for each field that is not so yet, and `no parallel.vpp`."""
    known = document if hasattr(document, "get") else {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _changes(known.get(name), value, f"{above}{name}.")
        elif known.get(name) != value:
            yield f"{above}{name} {value}"
    if above == "parallel.":
        yield from (f"no {above}{name}" for name in known if name not in fields)


def _read(text: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


# -- What would make a planned run end earlier or cost less, said without being asked -----------


# Less than this share of days or GPU-hours is not worth another plan.
_WORTH = 0.02
# Days so near to each other are the same: predictions are no better (docs/planner.md).
_SAME = 0.05
# Nodes fewer than the spec's that are tried.
_FEWER = (1, 2, 4, 8, 16)


class Advice(Document):
    """One sentence, the command that follows it if there is one, and what that saves or costs."""

    sentence: str
    command: str | None
    saves_seconds: float
    saves_gpu_hours: float


def advise(
    inputs: Inputs, option: Option, goal: Goal, words: str | None = None
) -> tuple[Advice, ...]:
    """Compare the plan of `option` with the layout that is free, and with fewer nodes.

    `words` give the same spec and profile to a command; without them no command is named.
    """
    if option.decision is None or option.forecast is None:
        return ()
    spec = option.decision.request.spec
    found, best = [], option
    free = freed(spec)
    if free != spec:
        other = plan_option(Inputs(free, inputs.profile, inputs.knowledge), goal)
        found_forecast, mine = other.forecast, option.forecast
        if found_forecast is not None and (
            _earlier(found_forecast, mine)
            or found_forecast.gpu_hours < (1 - _WORTH) * mine.gpu_hours
        ):
            assert other.plan is not None
            chosen = f"{other.plan.layout}, micro {other.plan.batch.micro_batch}"
            text = f"with layout and micro-batch free, {chosen}: {{gain}}"
            found.append(_advice(text, _apply(words), found_forecast, mine))
            best = other
    found += _sizes(inputs, free, best, option, goal, words)
    return tuple(found)


def _sizes(
    inputs: Inputs, free: RunSpec, best: Option, option: Option, goal: Goal, words: str | None
) -> Iterator[Advice]:
    """Yield what a full machine waits for, and the smaller number of GPUs that ends earliest."""
    mine, shown = best.forecast, option.forecast
    assert mine is not None and shown is not None
    smaller = [(one, one.forecast) for one in _smaller(inputs, free, mine, goal)]
    known = [(one, found) for one, found in smaller if found and _as_good(found, mine)]
    earlier = [pair for pair in known if _earlier(pair[1], mine)]
    # of those that end as early as the plan the smallest
    leader = min(earlier, key=lambda pair: pair[1].times.total_seconds, default=None) or min(
        known, key=lambda pair: pair[1].gpus, default=None
    )
    reason, waits = "", shown.times.repair_seconds
    if waits >= _WORTH * shown.times.total_seconds:
        count = inputs.profile.nodes.count
        taken = f"all {count}" if shown.nodes == count else f"{shown.nodes} of the {count}"
        reason = (
            f"the run takes {taken} nodes of {inputs.profile.name}, and "
            f"{days(waits)} pass until lost ones are repaired"
        )
    if leader is not None:
        one, found = leader
        left = mine.nodes - found.nodes
        fewer = f"{one.gpus:,} GPUs ({left} node{'s' if left > 1 else ''} less)"
        yield _advice(
            f"{reason}: {fewer} end {{gain}}" if reason else f"{fewer} end {{gain}}",
            _apply(words, f"--gpus {one.gpus} "),
            found,
            shown,
        )
    elif reason:
        yield Advice(
            sentence=f"{reason}; a node left free would help",
            command=None,
            saves_seconds=0.0,
            saves_gpu_hours=0.0,
        )


def _smaller(inputs: Inputs, free: RunSpec, mine: Forecast, goal: Goal) -> Iterator[Option]:
    """Plan on fewer nodes where that could end as early as `mine`."""
    per_node = mine.gpus // mine.nodes
    # a few nodes less, down to half, and the next power of two, which divides most easily
    fewer_nodes = {mine.nodes - fewer for fewer in _FEWER if 2 * fewer <= mine.nodes}
    if mine.nodes > 1:
        fewer_nodes.add(1 << (mine.nodes - 1).bit_length() - 1)
    for nodes in sorted(fewer_nodes, reverse=True):
        spec = with_gpus(free, nodes * per_node)
        yield plan_option(
            Inputs(spec, inputs.profile, inputs.knowledge),
            goal,
            before_seconds=(1 + _SAME) * mine.times.total_seconds,
        )


def _as_good(other: Forecast, mine: Forecast) -> bool:
    """Tell whether a smaller run ends earlier, or as early for fewer GPU-hours."""
    late = other.times.total_seconds > (1 + _SAME) * mine.times.total_seconds
    return _earlier(other, mine) or (not late and other.gpu_hours < (1 - _SAME) * mine.gpu_hours)


def _earlier(other: Forecast, mine: Forecast) -> bool:
    return other.times.total_seconds < (1 - _WORTH) * mine.times.total_seconds


def _apply(words: str | None, more: str = "") -> str | None:
    return None if words is None else f"hpctrain plan {words} {more}--apply"


def _advice(text: str, command: str | None, other: Forecast, mine: Forecast) -> Advice:
    seconds = mine.times.total_seconds - other.times.total_seconds
    hours = mine.gpu_hours - other.gpu_hours
    gains = [f"{days(abs(seconds))} {'earlier' if seconds > 0 else 'later'} ({days_range(other)})"]
    if other.cost is not None and mine.cost is not None:
        money = mine.cost.amount - other.cost.amount
        word = "cheaper" if money > 0 else "dearer"
        gains.append(f"{abs(money):,.0f} {other.cost.currency} {word}")
    else:
        gains.append(f"{abs(hours):,.0f} GPU-hours {'fewer' if hours > 0 else 'more'}")
    return Advice(
        sentence=text.format(gain=", ".join(gains)),
        command=command,
        saves_seconds=seconds,
        saves_gpu_hours=hours,
    )
