"""Divisors and multiples near a number: what a refusal proposes instead.

Belongs here: integer arithmetic. Does not belong here: what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """List all positive divisors of `number`, ascending."""
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    large = [number // part for part in reversed(small) if part * part != number]
    return (*small, *large)


def common_divisors(*numbers: int) -> tuple[int, ...]:
    """List the numbers that divide all of `numbers`, ascending."""
    first, *others = numbers
    return tuple(part for part in divisors(first) if all(other % part == 0 for other in others))


def nearest(value: int, choices: Iterable[int], count: int = 2) -> tuple[int, ...]:
    """Return the `count` choices nearest to `value` (other than `value` itself), ascending."""
    others = sorted({choice for choice in choices if choice != value})
    return tuple(sorted(sorted(others, key=lambda choice: abs(choice - value))[:count]))


def multiples_around(value: int, step: int, limit: int | None = None) -> tuple[int, ...]:
    """Return the multiples of `step` just below and above `value`: positive, at most `limit`."""
    below = value // step * step
    return tuple(
        number
        for number in (below, below + step)
        if number > 0 and number != value and (limit is None or number <= limit)
    )


def or_list(numbers: Iterable[int]) -> str:
    """Format alternatives: `8`, `8 or 16`, `4, 8 or 16`; `none` for nothing."""
    words = [str(number) for number in numbers]
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "none"
