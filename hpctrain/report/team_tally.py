"""Adds up the GPU time of runs exactly, before it becomes hours and money. Pure.

GPU time is counted in whole microseconds, and money is computed from sums of one price: so the
parts of a report add up to its totals. Amounts of different currencies are never added. Belongs
here: sums. Does not belong here: which runs are summed (`team_report`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from hpctrain.plan.job import GpuPrice
from hpctrain.telemetry.goodput import FIRST_START, OCCUPYING, WindowAccount
from hpctrain.telemetry.timeline import TICKS_PER_SECOND, Category

SAVING_CAUSE, BETWEEN_CAUSE = "saving", "between steps"
LOST = OCCUPYING - {Category.PRODUCTIVE, Category.UNREPORTED}
_TICKS_PER_HOUR = 3600 * TICKS_PER_SECOND
_CAUSES = {
    Category.PRODUCTIVE: None,
    Category.UNREPORTED: None,
    Category.SAVING: SAVING_CAUSE,
    Category.BETWEEN: BETWEEN_CAUSE,
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Cost(_Frozen):
    """Money in one currency for all GPU-hours, and of these for productive and lost ones."""

    currency: str
    total: float
    productive: float
    lost: float


class TimePart(_Frozen):
    """Time of one category with one cause; no cause for productive and unreported time.

    `gpu_hours` is 0 for time without nodes. `cost` is None without a price.
    """

    category: Category
    cause: str | None
    hours: float
    gpu_hours: float
    cost: float | None
    currency: str | None


class Spending(_Frozen):
    """GPU-hours, hours of runs without nodes, steps, and money of some runs.

    Lost GPU-hours are those of redone steps, saving, time between steps, starting, and restarting,
    which includes detecting. Of `unreported_gpu_hours` is not known whether they were productive:
    their trainers do not report steps. `queue_hours`, `held_hours` and `down_hours` are hours of
    runs that had no nodes. `tokens` and `images`: of steps that are in the final weights.
    `unpriced_gpu_hours` have no price, and no money counts them.
    """

    runs: int
    gpu_hours: float
    productive_gpu_hours: float
    lost_gpu_hours: float
    unreported_gpu_hours: float
    redone_gpu_hours: float
    saving_gpu_hours: float
    between_gpu_hours: float
    starting_gpu_hours: float
    restarting_gpu_hours: float
    queue_hours: float
    held_hours: float
    down_hours: float
    steps: int
    redone_steps: int
    tokens: int
    images: int
    costs: tuple[Cost, ...]
    unpriced_gpu_hours: float

    @property
    def productive_share(self) -> float | None:
        """Productive GPU-hours of all that were reported; None if nothing is known of any."""
        reported = self.gpu_hours - self.unreported_gpu_hours
        if reported <= 0 or (self.unreported_gpu_hours and not self.productive_gpu_hours):
            return None
        return self.productive_gpu_hours / reported

    @property
    def known_steps(self) -> int | None:
        """Steps that are kept; None where nothing is known of them."""
        return None if self.unreported_gpu_hours and not self.steps else self.steps

    @property
    def known_tokens(self) -> int | None:
        """Tokens or images of steps that are kept; None where their number was not reported."""
        found = self.tokens or self.images
        return found if found or self.known_steps == 0 else None


class CauseSpending(_Frozen):
    """GPU-hours lost by one cause, and the money for them in each currency.

    `mostly` is the category in which most of them were lost; `gpu_hours_before` those of the time
    before.
    """

    cause: str
    gpu_hours: float
    costs: tuple[Cost, ...]
    mostly: Category
    gpu_hours_before: float


_Spent = Counter[tuple[Category, str | None]]


@dataclass
class Tally:
    """Sums of accounts: wall ticks by category and cause, GPU ticks by price as well."""

    runs: set[str] = field(default_factory=set)
    wall: _Spent = field(default_factory=Counter)
    gpu: dict[GpuPrice | None, _Spent] = field(default_factory=dict)
    steps: int = 0
    redone_steps: int = 0
    tokens: int = 0
    images: int = 0

    def count(
        self, run: str, account: WindowAccount, gpus: int, price: GpuPrice | None, *, images: bool
    ) -> None:
        """Add one window of a run that has `gpus` while it has nodes; `images` are its tokens."""
        at_price = self.gpu.setdefault(price, Counter())
        for (category, known_cause), ticks in account.spent.items():
            cause = known_cause or _CAUSES.get(category, FIRST_START)
            self.wall[category, cause] += ticks
            if category in OCCUPYING:
                at_price[category, cause] += ticks * gpus
        if account.spent or account.kept_steps or account.redone_steps:
            self.runs.add(run)
        self.steps += account.kept_steps
        self.redone_steps += account.redone_steps
        self.tokens += 0 if images else account.tokens
        self.images += account.tokens if images else 0

    def add(self, other: Tally) -> None:
        """Add the sums of other accounts."""
        self.runs |= other.runs
        self.wall.update(other.wall)
        for price, spent in other.gpu.items():
            self.gpu.setdefault(price, Counter()).update(spent)
        self.steps += other.steps
        self.redone_steps += other.redone_steps
        self.tokens += other.tokens
        self.images += other.images

    def lost_by_cause(self) -> dict[str, Tally]:
        """Divide what is lost by its cause."""
        causes: dict[str, Tally] = {}
        for price, spent in self.gpu.items():
            for (category, cause), ticks in spent.items():
                if category in LOST and ticks:
                    of_cause = causes.setdefault(cause or FIRST_START, Tally())
                    of_cause.gpu.setdefault(price, Counter())[category, cause] += ticks
        return causes

    def parts(self) -> tuple[TimePart, ...]:
        """List the time by category and cause, in the order of the categories."""
        (price,) = self.gpu or (None,)  # one run has one price
        spent = self.gpu.get(price, Counter())
        order = list(Category)
        return tuple(
            TimePart(
                category=category,
                cause=cause,
                hours=ticks / _TICKS_PER_HOUR,
                gpu_hours=spent[category, cause] / _TICKS_PER_HOUR,
                cost=spent[category, cause] / _TICKS_PER_HOUR * price.per_gpu_hour
                if price and category in OCCUPYING
                else None,
                currency=price.currency if price and category in OCCUPYING else None,
            )
            for (category, cause), ticks in sorted(
                self.wall.items(), key=lambda one: (order.index(one[0][0]), one[0][1] or "")
            )
        )

    def gpu_hours(self, categories: Iterable[Category]) -> float:
        """Return the GPU-hours of some categories."""
        wanted = frozenset(categories)
        counted = (
            ticks
            for spent in self.gpu.values()
            for (category, _), ticks in spent.items()
            if category in wanted
        )
        return sum(counted) / _TICKS_PER_HOUR

    def mostly(self) -> Category:
        """Return the category of lost time that has most GPU-hours."""
        return max(sorted(LOST), key=lambda category: self.gpu_hours({category}))

    def costs(self) -> tuple[Cost, ...]:
        """Compute the money for GPU-hours, by currency."""
        amounts: dict[str, list[float]] = {}
        for price, spent in self.gpu.items():
            ticks = Counter[Category]()
            for (category, _), count in spent.items():
                ticks[category] += count
            if price is None or not ticks.total():
                continue
            parts = (OCCUPYING, frozenset({Category.PRODUCTIVE}), LOST)
            amount = amounts.setdefault(price.currency, [0.0, 0.0, 0.0])
            for number, wanted in enumerate(parts):
                hours = sum(ticks[category] for category in wanted) / _TICKS_PER_HOUR
                amount[number] += hours * price.per_gpu_hour
        return tuple(
            Cost(currency=currency, total=total, productive=productive, lost=lost)
            for currency, (total, productive, lost) in sorted(amounts.items())
        )

    def spending(self) -> Spending:
        """Convert the sums to hours and money."""
        waited = Counter[Category]()
        for (category, _), ticks in self.wall.items():
            waited[category] += ticks
        unpriced = self.gpu.get(None, Counter()).total()
        return Spending(
            runs=len(self.runs),
            gpu_hours=self.gpu_hours(OCCUPYING),
            productive_gpu_hours=self.gpu_hours({Category.PRODUCTIVE}),
            lost_gpu_hours=self.gpu_hours(LOST),
            unreported_gpu_hours=self.gpu_hours({Category.UNREPORTED}),
            redone_gpu_hours=self.gpu_hours({Category.REDONE}),
            saving_gpu_hours=self.gpu_hours({Category.SAVING}),
            between_gpu_hours=self.gpu_hours({Category.BETWEEN}),
            starting_gpu_hours=self.gpu_hours({Category.STARTING}),
            restarting_gpu_hours=self.gpu_hours({Category.DETECTING, Category.RESTARTING}),
            queue_hours=waited[Category.QUEUEING] / _TICKS_PER_HOUR,
            held_hours=waited[Category.HELD] / _TICKS_PER_HOUR,
            down_hours=waited[Category.DOWN] / _TICKS_PER_HOUR,
            steps=self.steps,
            redone_steps=self.redone_steps,
            tokens=self.tokens,
            images=self.images,
            costs=self.costs(),
            unpriced_gpu_hours=unpriced / _TICKS_PER_HOUR,
        )


def total(tallies: Iterable[Tally]) -> Tally:
    """Add up the sums of accounts."""
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    return whole


def causes_of(now: Tally, before: Tally) -> tuple[CauseSpending, ...]:
    """List the causes of lost GPU-hours, the most expensive first."""
    earlier = before.lost_by_cause()
    causes = [
        CauseSpending(
            cause=cause,
            gpu_hours=lost.gpu_hours(LOST),
            costs=lost.costs(),
            mostly=lost.mostly(),
            gpu_hours_before=earlier[cause].gpu_hours(LOST) if cause in earlier else 0.0,
        )
        for cause, lost in now.lost_by_cause().items()
    ]
    return tuple(sorted(causes, key=lambda one: (-one.gpu_hours, one.cause)))
