"""Formats a plan as sentences and columns, wrapped at a width that the caller knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import TYPE_CHECKING

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.job.render.job_options import continuation_line, continuation_problems
from hpctrain.page.text import LINE_WIDTH, Named, columns_text, facts, paragraph
from hpctrain.plan.documents import (
    TOLD_APART,
    BatchSplit,
    Certainty,
    Change,
    Explanation,
    FrontPoint,
    Plan,
    Prediction,
    RunnerUp,
)
from hpctrain.plan.forecast.documents import (
    Assumption,
    BudgetDecision,
    Forecast,
    SpotComparison,
)
from hpctrain.plan.forecast.options import days, days_column, days_range, money_range
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.plan.mesh.candidate import recompute_words

if TYPE_CHECKING:
    from hpctrain.job.plan import Advice, Option
    from hpctrain.job.prepare import Prepared
    from hpctrain.job.trainer_run import PreparedTrainerRun
    from hpctrain.plan.job import Job


_COLUMNS = {  # of the stages: header -> its parts of `MemoryBreakdown`
    "WEIGHT": ("weights",),
    "GRAD": ("gradients",),
    "OPTIM": ("optimizer",),
    "ACTIV": ("activations",),
    "BUFFER": ("logits", "buffers"),
    "RESERV": ("reserved",),
}
_SURE, _LIKELY = 0.9, 0.5  # probabilities of fitting, and the words for them


def plan_lines(plan: Plan, width: int = LINE_WIDTH) -> list[str]:
    """Format the summary that `plan` and `submit` show."""
    batch, learned = plan.batch, plan.learned_parameters
    learning = "" if learned is None else f", {short_count(learned)} of them learn"
    spans = ", ".join(f"{p.axis} {p.span}" for p in plan.placements if p.size > 1) or "one GPU"
    order = plan.layout.order
    spans = spans if order == DEFAULT_ORDER else f"{spans}; order {order}"
    peak = plan.memory[plan.peak_stage]
    sizes = {name.removesuffix("_bytes"): size for name, size in peak.model_dump().items()}
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {short_bytes(size)}" for name, size in ordered if size)
    return facts(
        (
            "Plan",
            f"{plan.run_name} -> {plan.profile_name} ({plan.nodes}), engine {plan.engine}, "
            f"{short_count(plan.parameters)} parameters{learning}",
        ),
        ("Layout", f"{plan.layout} ({spans})"),
        (
            "Batch",
            f"{batch.global_batch:,} = micro {batch.micro_batch} x accumulation "
            f"{batch.accumulation} x dp {plan.layout.dp}, {per_step(plan):,} {plan.unit} a step"
            f"{_ramp_words(batch)}",
        ),
        (
            "Memory",
            f"{short_bytes(peak.total_bytes)}{_memory_range(plan)} of "
            f"{short_bytes(plan.gpu_memory_bytes)} a GPU in stage {plan.peak_stage} ({parts})",
        ),
        *(_step_facts(plan, plan.prediction) if plan.prediction else ()),
        ("Run", _run(plan)),
        width=width,
    )


def answer_lines(
    option: Option,
    advice: Sequence[Advice] | None,
    ready: str | None = None,
    width: int = LINE_WIDTH,
) -> list[str]:
    """Answer first what everybody asks: does it fit, how long, how dear, is it the best?

    `plan` is None where nothing else was looked at, `ready` where it was not asked whether the
    run could be submitted.
    """
    plan, forecast = option.plan, option.forecast
    assert plan is not None
    peak = plan.memory[plan.peak_stage].total_bytes
    free = 1 - peak / plan.gpu_memory_bytes
    named: list[Named] = [("Fits", f"{_fits(plan)}{percent(free)} free")]
    if forecast is None:
        unknown = "unknown: the profile does not have the speed of its GPUs"
        named.append(("Takes", option.remark or unknown))
    else:
        named += _price_facts(forecast)
        better = [
            f"{one.sentence}: `{one.command}`" if one.command else one.sentence
            for one in advice or ()
        ]
        if advice is not None:
            none = "nothing found by other layouts or by fewer nodes"
            named.append(("Better", better or none))
    return [*facts(*named, ("Ready", ready), width=width), ""]


def trainer_answer_lines(
    forecast: Forecast | None, unknown: str, ready: str | None = None, width: int = LINE_WIDTH
) -> list[str]:
    """Answer the same of a run with a trainer of its own; `unknown`: why there is no forecast."""
    takes = [("Takes", unknown)] if forecast is None else _price_facts(forecast)
    return [*facts(*takes, ("Ready", ready), width=width), ""]


def _price_facts(forecast: Forecast) -> Iterator[Named]:
    """Say how long a run takes and what it costs, with the range of the played runs."""
    training = days(forecast.times.training_seconds)
    mean = days(forecast.times.total_seconds)
    took = days_range(forecast)
    average = "" if took == mean else f", {mean} on average"
    yield "Takes", f"{took}{average}; {training} of it training"
    hours = f"{forecast.gpu_hours:,.0f} GPU-hours"
    money = money_range(forecast)
    yield "Costs", hours if money is None else f"{money}; {hours} on average"


def run_lines(prepared: Prepared | PreparedTrainerRun, width: int = LINE_WIDTH) -> list[str]:
    """Format what `submit` shows of a run of either kind."""
    from hpctrain.job.trainer_run import PreparedTrainerRun, trainer_lines

    if isinstance(prepared, PreparedTrainerRun):
        lines = facts(*trainer_lines(prepared), width=width)
    else:
        lines = plan_lines(prepared.plan, width)
    return [*lines, *continuation_lines(prepared.job, width)]


def continuation_lines(job: Job, width: int = LINE_WIDTH) -> list[str]:
    """Describe how the run continues after an attempt that ends early, and what prevents it."""
    continues = continuation_line(job.profile, job.partition)
    problems = continuation_problems(job.profile, job.partition)
    return facts(("Continues", (continues, *problems)), width=width)


def short_count(count: int) -> str:
    """Format with four digits: 174.6B, 940.8K."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.4g}{suffix}"
    return str(count)


def _ramp_words(batch: BatchSplit) -> str:
    if not batch.ramp:
        return ""
    return (
        f"; before, {batch.ramp_steps:,} smaller steps, from {batch.ramp[0].global_batch:,} to "
        f"{batch.ramp[-1].global_batch:,}"
    )


def per_step(plan: Plan) -> int:
    """Count the tokens of one step, or its images."""
    batch = plan.batch
    return batch.global_batch if plan.unit == "images" else batch.tokens_per_step


def _step_facts(plan: Plan, prediction: Prediction) -> Iterator[Named]:
    """Say seconds, shares of the peak rate, and the parts of a step, the largest first."""
    seconds = prediction.parts.total_seconds
    rates = f"MFU {percent(prediction.mfu)}, HFU {percent(prediction.hfu)}"
    rate = per_step(plan) / (seconds * plan.layout.world_size)
    speed = f"{rate:,.0f} {plan.unit}/s a GPU"
    parts = sorted(prediction.parts.model_dump().items(), key=lambda part: -part[1])
    shares = [
        f"{name.removesuffix('_seconds').replace('_', ' ')} {percent(part / seconds)}"
        for name, part in parts
        if part >= 0.001 * seconds
    ]
    sure, spread = plan.certainty, " predicted"
    if sure is not None and sure.low_step_seconds and sure.high_step_seconds:
        spread = f" ({step_range(sure.low_step_seconds, sure.high_step_seconds)})"
    step = f"{seconds_text(seconds)} a step{spread}, {rates}, {speed}"
    yield "Step", (step, ", ".join(shares))
    if sure is not None:  # which figures are the site's own: a plan never uses them silently
        instead = "on this cluster, in place of packaged rates: "
        yield "Measured", sure.measured and instead + ", ".join(sure.measured)
        yield "Learned", sure.calibrated and f"from {sure.calibrated}"


def _fits(plan: Plan) -> str:
    """Format `yes, with 98%: 61.2 GiB of 79.2 GiB a GPU, `; `likely` below 90 %."""
    sure = plan.certainty
    peak = plan.memory[plan.peak_stage].total_bytes
    level = f"{short_bytes(peak)} of {short_bytes(plan.gpu_memory_bytes)} a GPU"
    if sure is None:
        return f"yes: {level} at most, "
    odds = sure.fit_probability
    word = "yes" if odds >= _SURE else "likely" if odds >= _LIKELY else "unlikely"
    shown = "above 99%" if odds > 0.99 else f"{odds:.0%}"  # never a claim of being sure
    return f"{word} ({shown}): {level}{_memory_range(plan)}, "


def step_range(low: float, high: float) -> str:
    """Format `80%: 31.2-37.5`, `80%: 0.512-0.604`."""
    if high >= 1000:
        return f"80%: {short_duration(low)}-{short_duration(high)}"
    digits = max(0, 2 - floor(log10(low)))  # three that say something
    return f"80%: {low:.{digits}f}-{high:.{digits}f}"


def _memory_range(plan: Plan) -> str:
    """Format ` (80%: 55.1-63.0)`, in the unit of the prediction."""
    sure = plan.certainty
    if sure is None:
        return ""
    low, high = short_bytes(sure.low_peak_bytes), short_bytes(sure.high_peak_bytes)
    if low.split()[-1] == high.split()[-1]:
        low, high = low.split()[0], high.split()[0]
    return f" (80%: {low}-{high})"


def percent(share: float) -> str:
    """`54.8%`"""
    return f"{share:.1%}"


def seconds_text(seconds: float) -> str:
    """Format with three or four digits, so that layouts differ: `33.98 s`, `0.512 s`."""
    if seconds >= 1000:
        return short_duration(seconds)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds:.3g} s"


def _run(plan: Plan) -> str:
    batch = plan.batch
    whole = batch.train_samples * per_step(plan) // batch.global_batch
    parts = [f"{batch.train_steps:,} steps = {whole:,} {plan.unit}"]
    if plan.prediction is not None:
        hours = f"{plan.prediction.gpu_hours:,.0f} GPU-hours of training"
        parts.append(f"{short_duration(86400 * plan.prediction.days)}, {hours}")
    modules = plan.recompute_modules or ("core_attn",)
    again = recompute_words(plan.recompute, modules, plan.recompute_layers)
    how = [f"recompute {again}", plan.precision]
    how += [f"ZeRO {plan.zero}"] if plan.zero > 1 else []
    how += [f"shards of {plan.shard_gpus} GPUs"] if plan.shard_gpus else []
    how += [f"offload to {plan.offload}"] if plan.offload != "none" else []
    away = plan.activation_offload_layers
    how += [f"activations of {away} layers on the host"] if away else []
    return f"{', '.join(parts)}; {', '.join(how)}"


def stage_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Tabulate the stages; memory in GiB, the last column the sum of those before it."""
    headers = ["STAGE", "LAYERS", "PARAMS", *_COLUMNS, "GiB"]
    rows: list[list[str]] = []
    for stage, memory in zip(plan.stages, plan.memory, strict=True):
        sizes = [
            round(sum(getattr(memory, f"{name}_bytes") for name in names) / 2**30, 2)
            for names in _COLUMNS.values()
        ]
        # Format `12`, `3x4` for three chunks of four layers, or `3+4+4`, and the model's ends
        chunks = stage.chunk_layers
        alike = len(set(chunks)) == 1
        text = "+".join(map(str, chunks))
        if len(chunks) > 1 and alike:
            text = f"{len(chunks)}x{chunks[0]}"
        ends = ("emb" if stage.embedding else "", "loss" if stage.loss else "")
        layers = " ".join(part for part in (text, *ends) if part)
        rows.append(
            [str(stage.index), layers, short_count(stage.parameters_per_gpu)]
            + [f"{size:.2f}" for size in (*sizes, sum(sizes))]
        )
    return headers, rows


# -- Formats plans for several numbers of GPUs as a table ---------------------------------------


def option_rows(options: Sequence[Option]) -> tuple[list[str], list[list[str]]]:
    """Tabulate one row for each number of GPUs; `-` where nothing is known."""
    headers = ["GPUS", "S/STEP", "MFU%", "DAYS", "GPU-HOURS", "COST", "LAYOUT"]
    rows = []
    for option in options:
        plan, forecast = option.plan, option.forecast
        if plan is None:
            reason = str(option.refusal).splitlines()[0].partition(" (")[0]
            rows.append([str(option.gpus), "-", "-", "-", "-", "-", reason])
            continue
        cost = forecast.cost if forecast else None
        rows.append(
            [
                str(option.gpus),
                f"{plan.step_seconds:.4g}" if plan.step_seconds else "-",
                f"{100 * plan.prediction.mfu:.1f}" if plan.prediction else "-",
                days_column(forecast) if forecast else "-",
                f"{forecast.gpu_hours:,.0f}" if forecast else "-",
                f"{cost.amount:,.0f} {cost.currency}" if cost else "-",
                str(plan.layout),
            ]
        )
    return headers, rows


# -- Formats why a plan was chosen, in lines of a width that the caller knows -------------------


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
    against = ""  # the spec's layout beside the one that `parallel: auto` would choose
    if given is not None and given.slower is not None:
        against = f"{share(given.slower)}: "
    return [
        *facts(
            ("Search", counts_text(explanation)),
            ("Winner", (winner.description, price)),
            ("Given", (f"{against}{given.description}", _loss(given)) if given else None),
            width=width,
        ),
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
    return facts(("Doubt", text), width=width)


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
    lines = ["", title] if runners else []
    for one in runners:
        head = "no room" if one.shortage else "" if one.slower is None else share(one.slower)
        name = one.description if one.differs == str(one.layout) else one.differs
        lines += facts((f"{head:>9}", (name, _loss(one))), margin=_MARGIN, width=width)
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
        lines += paragraph(point.description, head, width=width)
    return lines


# -- Formats a forecast as sentences and columns, wrapped at a width that the caller knows ------


def forecast_lines(forecast: Forecast, width: int = LINE_WIDTH) -> list[str]:
    """Format the block that `plan` shows below the plan itself."""
    times = forecast.times
    slices = f" · {forecast.slices:,} time slices" if forecast.slices > 1 else ""
    waiting = f" + {days(times.waiting_seconds)} of waiting" if times.waiting_seconds >= 0.5 else ""
    grows = times.training_seconds < 0.9999 * forecast.steps * forecast.step_seconds
    times_or_to = "of up to" if grows else "x"
    time = (
        f"{days(times.total_seconds)} on average = {days(times.training_seconds)} of training "
        f"({forecast.steps:,} steps {times_or_to} {short_duration(forecast.step_seconds)}) at "
        f"{forecast.ettr:.1%} effective time{waiting}{slices}"
    )
    overheads = [
        f"{name} {days(getattr(times, f'{name}_seconds'))}"
        for name in ("evaluation", "saving", "redone", "starting", "detecting", "waiting")
        if getattr(times, f"{name}_seconds") >= 0.5
    ]
    if times.repair_seconds >= 0.01 * times.total_seconds:
        overheads[-1] += f", {days(times.repair_seconds)} of it for nodes to be repaired"
    cost = f"{forecast.gpu_hours:,.0f} GPU-hours on {forecast.gpus:,} GPUs"
    if forecast.cost is None:
        cost = f"{cost} (the profile has no prices)"
    else:
        price, currency = forecast.cost.per_gpu_hour, forecast.cost.currency
        tariff = forecast.cost.tariff
        cost = f"{forecast.cost.amount:,.0f} {currency} = {cost} x {price:g} {currency} ({tariff})"
    stops = forecast.interruptions
    text = (
        f"{_count(forecast.failures)} expected, one per {days(stops.failure_mtbf_seconds)} on "
        f"{forecast.nodes:,} node{'s' if forecast.nodes > 1 else ''}"
    )
    if stops.preemption_mtbf_seconds is not None:
        text += (
            f" · {_count(forecast.preemptions)} preemptions, one per "
            f"{days(stops.preemption_mtbf_seconds)}"
        )
    failures = f"{text} · {days(stops.restart_seconds)} per restart"
    return facts(
        ("Time", (time, " · ".join(overheads))),
        ("Cost", cost),
        ("Failures", failures),
        ("Saves", _saves(forecast)),
        ("Played", _played(forecast)),
        *(("Assumed", str(assumption)) for assumption in forecast.assumptions),
        *(("Warning", warning) for warning in forecast.warnings),
        width=width,
    )


def _played(forecast: Forecast) -> str:
    spread = forecast.spread
    if spread is None:
        return "no run, for there would be too many interruptions: means by closed forms"
    text = (
        f"{spread.trials} runs with the supervisor's policy (seed {spread.seed}), 90 of 100 within "
        f"{days_range(forecast)}; "
    )
    if spread.step_deviation:
        text += f"each has a step time of its own, ±{spread.step_deviation:.0%}"
    else:
        text += "the step time is taken as predicted"
    if spread.stopped:
        text += f"; {spread.stopped:.0%} of them stop, most often: {spread.stop_reason}"
    return text


def spot_lines(comparison: SpotComparison, width: int = LINE_WIDTH) -> list[str]:
    """Format both tariffs in columns, then the recommendation."""
    rows = [
        [
            one.tariff,
            days_column(one),
            f"{one.gpu_hours:,.0f}",
            f"{one.cost.amount:,.0f} {one.cost.currency}" if one.cost else "-",
            f"{one.starts:,.1f}",
        ]
        for one in (comparison.on_demand, comparison.spot)
        if one is not None
    ]
    headers = ("Tariff", "DAYS", "GPU-HOURS", "COST", "STARTS")
    advice = [f"{comparison.recommended}: {comparison.reason}"]
    assumed: list[Assumption] = []
    if comparison.spot is not None:
        limit = comparison.break_even_preemption_seconds
        if limit is None:
            advice.append("spot is dearer even without preemptions")
        elif limit == 0:
            advice.append("spot is cheaper however often nodes are taken away")
        else:
            rarer = f"rarer than one per {days(limit)}"
            advice.append(f"spot is cheaper while preemptions are {rarer}")
        known = comparison.on_demand.assumptions
        assumed = [one for one in comparison.spot.assumptions if one not in known]
    return [
        *columns_text(headers, rows, [False, True, True, True, True]),
        *facts(("Take", advice), *(("Assumed", str(one)) for one in assumed), width=width),
    ]


def decision_lines(decision: BudgetDecision, width: int = LINE_WIDTH) -> list[str]:
    """Format what the budget allows, or what is missing: one paragraph per statement."""
    return facts(("Budget", decision.lines), width=width)


def _saves(forecast: Forecast) -> str:
    interval, checkpoint = forecast.interval, forecast.checkpoint
    often = f"every {interval.steps:,} steps ({days(interval.seconds)})"
    stops = f"stops training for {short_duration(checkpoint.stall_seconds)}"
    if checkpoint.total_bytes is None:  # of a trainer that is not known
        return "none" if interval.steps >= forecast.steps else f"{often}, each {stops}"
    text = (
        f"{short_bytes(checkpoint.total_bytes)} {often}; best {interval.best_steps:,} (Young "
        f"{days(interval.young_seconds)}, Daly {days(interval.daly_seconds)})"
    )
    write = f"{short_duration(checkpoint.write_seconds)} to write ({checkpoint.write_limit})"
    return f"{text} · {write}, {stops}"


def _count(number: float) -> str:
    """Format an expected number: two digits below ten."""
    return f"{number:.2g}" if 0.001 <= number < 10 else f"{number:,.0f}"
