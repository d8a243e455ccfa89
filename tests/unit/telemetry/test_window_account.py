"""Accounts of windows: they add up exactly, agree with goodput, and need no older launches."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from goodput_histories import BEGIN, History, made_up, submitted

from hpctrain.telemetry.goodput import WindowAccount, account, needless_epochs, window_accounts
from hpctrain.telemetry.timeline import Category, MarkKind, ticks, timeline

SEEDS = range(150)
EVER = (0, 10**18)


def accounts(history: History, bounds: tuple[int, ...]) -> tuple[WindowAccount, ...]:
    cut = timeline(history.marks, history.steps, history.saves, history.now)
    return window_accounts(cut, history.steps, bounds)


def seconds_of(one: WindowAccount) -> dict[tuple[Category, str | None], float]:
    return {kind: spent / 1e6 for kind, spent in one.spent.items()}


def random_bounds(history: History, seed: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    span = max(1.0, history.now - BEGIN)
    return tuple(sorted(ticks(BEGIN + dice.uniform(-0.2, 1.2) * span) for _ in range(5)))


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbouring_windows_add_up_to_both(seed: int) -> None:
    history = made_up(seed)
    bounds = random_bounds(history, seed)
    parts = accounts(history, bounds)
    (whole,) = accounts(history, (bounds[0], bounds[-1]))
    spent: Counter[tuple[Category, str | None]] = Counter()
    for part in parts:
        spent.update(part.spent)
        assert sum(part.spent.values()) <= part.end - part.begin
    assert dict(spent) == whole.spent
    for field in ("kept_steps", "redone_steps", "tokens"):
        assert sum(getattr(part, field) for part in parts) == getattr(whole, field)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_of_time_is_the_account_of_the_run(seed: int) -> None:
    history = made_up(seed)
    cut = timeline(history.marks, history.steps, history.saves, history.now)
    known = account(cut, 8)
    (whole,) = accounts(history, EVER)
    by_category: Counter[Category] = Counter()
    for (category, _), spent in whole.spent.items():
        by_category[category] += spent
    assert {c: by_category[c] / 1e6 for c in Category} == dict(known.seconds)
    assert (whole.kept_steps, whole.redone_steps) == (known.kept_steps, known.lost_steps)
    assert whole.tokens == 7 * known.kept_steps


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_of_launches_that_ended_before_change_nothing(seed: int) -> None:
    history = made_up(seed)
    begin = random_bounds(history, seed)[2]
    bounds = (begin, begin + 10**9, 10**18)
    before = accounts(history, bounds)
    needless = needless_epochs(history.marks, history.steps, begin)
    history.steps = [step for step in history.steps if step.epoch not in needless]
    assert accounts(history, bounds) == before


def test_some_launches_are_left_out() -> None:
    """The property above would also hold if none were."""
    left_out = 0
    for seed in SEEDS:
        history = made_up(seed)
        begin = random_bounds(history, seed)[2]
        left_out += bool(needless_epochs(history.marks, history.steps, begin))
    assert left_out > 20


def test_a_launch_across_the_border() -> None:
    """Waits 100 s, starts in 10 s, trains 10 steps of a second, of which 4 are before the border;
    then 3 of them are redone after a crash."""
    history = submitted().train(1, 10).mark(MarkKind.LAUNCH_ENDED, "crash", failure=True).after(5)
    history.mark(MarkKind.LAUNCH_STARTED).after(6).train(8, 12)
    border = ticks(BEGIN + 114)
    first, second = accounts(history, (0, border, 10**18))
    assert seconds_of(first) == {
        (Category.QUEUEING, None): 100.0,
        (Category.STARTING, None): 10.0,
        (Category.PRODUCTIVE, None): 4.0,
    }
    assert seconds_of(second) == {
        (Category.PRODUCTIVE, None): 8.0,
        (Category.REDONE, "crash"): 3.0,
        (Category.RESTARTING, "crash"): 5.0,
        (Category.STARTING, "crash"): 6.0,
    }
    # The step that ends at the border belongs to the window that begins there.
    assert (first.kept_steps, first.redone_steps, first.tokens) == (3, 0, 21)
    assert (second.kept_steps, second.redone_steps, second.tokens) == (9, 3, 63)
