"""What would make a planned run end earlier or cost less, said without being asked.

Belongs here: which other plans are looked at, and when one is worth a sentence. Does not belong
here: planning and forecasting them (`plan`), why a layout wins (`hpctrain.plan.alternatives`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.job.plan import Inputs, Option, freed, plan_option, with_gpus
from hpctrain.plan.documents import Goal
from hpctrain.plan.forecast.documents import Forecast
from hpctrain.plan.forecast.options import days, days_range
from hpctrain.spec.document import Document
from hpctrain.spec.run import RunSpec

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
        if other.forecast is not None and _better(other.forecast, option.forecast):
            found.append(_layout(other, option, words))
            best = other
    found += _sizes(inputs, free, best, option, goal, words)
    return tuple(found)


def _layout(other: Option, option: Option, words: str | None) -> Advice:
    assert other.plan and other.forecast and option.forecast
    chosen = f"{other.plan.layout}, micro {other.plan.batch.micro_batch}"
    return _advice(
        f"with layout and micro-batch free, {chosen}: {{gain}}",
        _apply(words),
        other.forecast,
        option.forecast,
    )


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
    for nodes in _fewer_nodes(mine.nodes):
        spec = with_gpus(free, nodes * per_node)
        yield plan_option(
            Inputs(spec, inputs.profile, inputs.knowledge),
            goal,
            before_seconds=(1 + _SAME) * mine.times.total_seconds,
        )


def _fewer_nodes(nodes: int) -> tuple[int, ...]:
    """List a few nodes less, down to half, and the next power of two, which divides most easily."""
    some = {nodes - fewer for fewer in _FEWER if 2 * fewer <= nodes}
    if nodes > 1:
        some.add(1 << (nodes - 1).bit_length() - 1)
    return tuple(sorted(some, reverse=True))


def _better(other: Forecast, mine: Forecast) -> bool:
    return _earlier(other, mine) or other.gpu_hours < (1 - _WORTH) * mine.gpu_hours


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
