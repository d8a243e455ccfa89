"""How many replicas a service wants at a moment, and why. Pure.

In this order: a person's word, the table of hours, the engines' own figures, and nobody asking at
all. A replica on Slurm costs a wait in the queue and minutes of loading, so the table looks ahead
by as long, and the reaction to load is slow to take back what it has added. Belongs here: that
choice. Does not belong here: which replica is started or drained (`decide`), where the figures come
from (`traffic`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.records.service_records import ScalingMemory, ScalingSettings

# An engine whose requests wait for so many per replica is behind: about one batch's turn.
WAITING_PER_REPLICA = 4.0
# Beyond it vLLM begins to preempt requests for lack of blocks (docs: Optimization, Preemption).
FULL_KV_SHARE = 0.9
# Of the capacity of what would remain: below it one replica fewer is enough.
CALM_SHARE = 0.7
# How long it has to be calm before one replica goes; a load that costs minutes must not flap.
LEAST_CALM_SECONDS = 600.0
_DAY_MINUTES = 1440


@dataclass(frozen=True)
class Load:
    """What the router and the engines have counted. None: not known.

    `arrival_rate` are requests per second over the last minute or so, `waiting` requests that all
    engines together hold back, `kv_share` the fullest engine's use of its keys and values.
    `idle_since`: the last request, or the start of the service (seconds since the epoch).
    `refused_lately`: requests came while no replica was ready.
    """

    arrival_rate: float | None = None
    waiting: float | None = None
    kv_share: float | None = None
    idle_since: float | None = None
    refused_lately: bool = False


@dataclass(frozen=True)
class Wanted:
    """How many replicas, and why, for people."""

    count: int
    reason: str


@dataclass(frozen=True)
class Replicas:
    """How many replicas there are: all that are kept, and those of them that answer."""

    kept: int
    ready: int


def wanted_now(
    policy: ScalingSettings,
    load: Load,
    replicas: Replicas,
    memory: ScalingMemory,
    *,
    now: float,
    local_minute: float,
    lead_seconds: float,
    asked: int | None,
) -> tuple[Wanted, ScalingMemory]:
    """Choose the number of replicas at `now`, and what to remember for the next time.

    `local_minute` is the minute of the day in the zone of the table, `lead_seconds` how long a new
    replica takes from its submission to its first answer, `asked` a person's number.
    """
    if asked is not None:
        return Wanted(asked, "as a person has asked"), memory
    floor = scheduled(policy, local_minute, lead_seconds)
    wanted = floor
    if policy.react:
        lowest = floor.count if policy.hours else policy.least
        wanted, memory = _reaction(policy, load, replicas, memory, now, lead_seconds, lowest)
    count = min(max(wanted.count, policy.least), policy.most)
    if count != wanted.count:
        bound = f"at least {count}" if count > wanted.count else f"at most {count}"
        wanted = Wanted(count, f"{wanted.reason}; {bound}")
    if policy.idle_seconds is not None and not load.refused_lately:
        idle_seconds = now - load.idle_since if load.idle_since is not None else 0.0
        if idle_seconds >= policy.idle_seconds:
            return Wanted(0, f"no request for {idle_seconds:.0f} s"), memory
    if policy.least == 0 and wanted.count == 0 and load.refused_lately:
        return Wanted(1, "requests came while there was no replica"), memory
    return wanted, memory


def scheduled(policy: ScalingSettings, local_minute: float, lead_seconds: float) -> Wanted:
    """The number of the table: the most of any time from now until a new replica would be ready.

    Without a table it is the number of the busiest hour.
    """
    if not policy.hours:
        return Wanted(policy.count, "the plan's number")
    carriers = policy.count - policy.spare
    ends = local_minute + lead_seconds / 60
    minutes = [local_minute]
    for begin, _ in policy.hours:
        later = begin if begin >= local_minute else begin + _DAY_MINUTES
        if later <= ends:
            minutes.append(float(later))
    # the earliest of the busiest
    busiest = max(minutes, key=lambda minute: (_share_at(policy, minute), -minute))
    share, of_day = _share_at(policy, busiest), int(busiest % _DAY_MINUTES)
    count = math.ceil(round(carriers * share, 6))
    count += policy.spare if count else 0
    clock = f"{of_day // 60:02d}:{of_day % 60:02d}"
    return Wanted(count, f"{share:g} of the busiest hour's rate at {clock}, as `hours` says")


def _share_at(policy: ScalingSettings, minute: float) -> float:
    """The share that holds at a minute of the day: of the last entry before it, over midnight."""
    of_day = minute % _DAY_MINUTES
    before = [share for begin, share in policy.hours if begin <= of_day]
    return before[-1] if before else policy.hours[-1][1]


def _reaction(
    policy: ScalingSettings,
    load: Load,
    replicas: Replicas,
    memory: ScalingMemory,
    now: float,
    lead_seconds: float,
    lowest: int,
) -> tuple[Wanted, ScalingMemory]:
    """Add replicas at once when engines are behind, take one back after it was calm for long."""
    target = max(memory.target if memory.target is not None else policy.count, lowest)
    rate, waiting, by_rate = load.arrival_rate, load.waiting, None
    if rate is not None and policy.capacity_rate > 0:
        needed = math.ceil(round(rate / policy.capacity_rate, 6))
        by_rate = needed + policy.spare if needed else 0
    busy = ""
    if replicas.ready and (waiting or 0.0) / replicas.ready >= WAITING_PER_REPLICA:
        busy = f"{waiting:.0f} requests wait in the engines"
    elif (load.kv_share or 0.0) >= FULL_KV_SHARE:
        busy = f"keys and values of an engine are {load.kv_share:.0%} full"
    # Calm: one replica fewer than the target would do; with unknown figures it would not.
    borne = CALM_SHARE * policy.capacity_rate * max(target - 1 - policy.spare, 0)
    calm = rate is not None and (rate <= borne or rate == 0) and waiting == 0
    arriving = replicas.kept - replicas.ready
    if by_rate is not None and by_rate > target:
        words = f"{rate:.3g} requests/s need {by_rate} replicas"
        target, memory = by_rate, ScalingMemory(target=by_rate, changed_at=now)
    elif busy and not arriving and now - (memory.changed_at or 0.0) >= lead_seconds:
        target, words = min(target + 1, policy.most), busy
        memory = ScalingMemory(target=target, changed_at=now)
    elif busy or not calm:
        words = busy or "the load needs what there is"
        memory = ScalingMemory(target=target, changed_at=memory.changed_at)
    else:
        calm_since = memory.calm_since if memory.calm_since is not None else now
        changed_at, words = memory.changed_at, f"calm for {now - calm_since:.0f} s"
        if now - calm_since >= max(LEAST_CALM_SECONDS, 2 * lead_seconds) and target > lowest:
            target, changed_at, calm_since = target - 1, now, now
        memory = ScalingMemory(target=target, changed_at=changed_at, calm_since=calm_since)
    return Wanted(target, words), memory
