"""Quantities as people write them: durations, byte sizes, bandwidths and token counts.

Each type is a plain number with a unit in its name, a parser for the written form, and a `str`
that can be parsed again. Belongs here: nothing else. Imports nothing of ours; pydantic is only
met through `__get_pydantic_core_schema__`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Self

# A comma separates groups of three digits only: `1,5TB` is a mistake and not fifteen.
_NUMBER = r"\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9][0-9_]*(?:\.[0-9]+)?)\s*"
_NUMBER_AND_SUFFIX = re.compile(_NUMBER + r"([A-Za-z/]*)\s*")


def _digits(number: float) -> str:
    """All digits that it takes to read the same number again, without an exponent."""
    return str(int(number)) if number.is_integer() else format(Decimal(repr(number)), "f")


class _Quantity(float):
    """A number that is written with a unit; subclasses define the suffixes and the scale."""

    suffixes: ClassVar[dict[str, float]] = {}
    examples: ClassVar[str] = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the written form. Raises ValueError with examples of what is accepted."""
        match = _NUMBER_AND_SUFFIX.fullmatch(text)
        if match is None or match[2] not in cls.suffixes:
            raise ValueError(f"expected {cls.examples}, got `{text}`")
        number = cls(float(match[1].replace(",", "").replace("_", "")) * cls.suffixes[match[2]])
        if math.isinf(number):
            raise ValueError(f"expected {cls.examples}, got a number that is too large")
        return number

    @classmethod
    def accept(cls, value: object) -> Self:
        """Turn what stands in a YAML file into a quantity: written form, or a bare number."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and "" in cls.suffixes:
            if not 0 <= value < 1e300:
                raise ValueError(f"expected {cls.examples}, got `{value}`")
            return cls(value)
        raise ValueError(f"expected {cls.examples}, got `{value}`")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls.accept, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        kinds = ["string", "number"] if "" in cls.suffixes else ["string"]
        # A field's own description replaces this one; the comment stays for `spec.reference`.
        return {"type": kinds, "description": cls.examples, "$comment": cls.examples}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        """The largest suffix that gives an exact, short number; it can be parsed again.

        Bytes (`GB/s`) come before bits (`Tb/s`), so that figures of one profile can be compared.
        """
        ordered = sorted(self.suffixes.items(), key=lambda item: ("b" in item[0], -item[1]))
        for suffix, scale in ordered:
            amount = float(self) / scale
            exact = amount == round(amount, 3) and amount * scale == float(self)
            short = exact and 1 <= amount < 1e9
            if suffix and short:
                return f"{_digits(amount)}{suffix}"
        suffix, scale = min(ordered, key=lambda item: item[1])
        return f"{_digits(float(self) / scale)}{suffix}"


class ByteSize(_Quantity):
    """A number of bytes; KiB is 1024 bytes, kB is 1000 (IEC 80000-13)."""

    suffixes: ClassVar[dict[str, float]] = {
        "B": 1,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }
    examples: ClassVar[str] = "a size such as `80GiB` or `500MB`"


class Bandwidth(_Quantity):
    """Bytes per second in one direction; `Gb/s` are gigabits as printed on network cards."""

    suffixes: ClassVar[dict[str, float]] = {
        "B/s": 1,
        "MB/s": 1e6,
        "GB/s": 1e9,
        "TB/s": 1e12,
        "Mb/s": 1e6 / 8,
        "Gb/s": 1e9 / 8,
        "Tb/s": 1e12 / 8,
    }
    examples: ClassVar[str] = "a bandwidth such as `300GB/s` or `200Gb/s`"


class FlopRate(_Quantity):
    """Floating-point operations per second."""

    suffixes: ClassVar[dict[str, float]] = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
    examples: ClassVar[str] = "a rate such as `312TFLOP/s`"


class TokenCount(_Quantity):
    """A number of tokens: `300B`, `1.5T`, `20M` or a bare number."""

    suffixes: ClassVar[dict[str, float]] = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    examples: ClassVar[str] = "a number of tokens such as `300B` or `20M`"


class Duration(_Quantity):
    """Seconds, written as Slurm writes a time limit or with a unit (sbatch(1), `--time`).

    `24:00:00` and `1-12:00:00` are hours:minutes:seconds with optional days; `90s`, `30min`,
    `2h`, `7d` carry a unit. A bare number is refused, because Slurm reads it as minutes and
    everybody else as seconds.
    """

    suffixes: ClassVar[dict[str, float]] = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    examples: ClassVar[str] = "a duration such as `24:00:00`, `2-12:00:00`, `30min` or `90s`"
    _CLOCK: ClassVar[re.Pattern[str]] = re.compile(
        r"\s*(?:(\d+)-)?(\d{1,4}):([0-5]\d):([0-5]\d)\s*"
    )

    @classmethod
    def parse(cls, text: str) -> Self:
        match = cls._CLOCK.fullmatch(text)
        if match is None:
            return super().parse(text)
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return cls(days * 86400 + hours * 3600 + minutes * 60 + seconds)

    def slurm(self) -> str:
        """The form that sbatch(1) takes: `[days-]hours:minutes:seconds`."""
        seconds = round(self)
        days, rest = divmod(seconds, 86400)
        clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
        return f"{days}-{clock}" if days else clock

    def __str__(self) -> str:
        seconds = round(self)
        return (
            self.slurm() if seconds == float(self) and seconds >= 60 else f"{_digits(float(self))}s"
        )


class Latency(_Quantity):
    """Seconds that somebody waits for an answer, written with a unit."""

    suffixes: ClassVar[dict[str, float]] = {"ms": 1e-3, "s": 1}
    examples: ClassVar[str] = "a latency such as `450ms` or `2s`"

    def __str__(self) -> str:
        """Milliseconds below one second; it can be parsed again."""
        if self < 1:
            return f"{_digits(round(float(self) * 1e3, 6))}ms"
        return f"{_digits(float(self))}s"


@dataclass(frozen=True)
class Money:
    """An amount and its currency (ISO 4217 code): `200000usd`, `1.5M EUR`, `200,000 USD`."""

    amount: float
    currency: str

    _FORM: ClassVar[re.Pattern[str]] = re.compile(_NUMBER + r"([kM]?)\s*([A-Za-z]{3})\s*")
    _EXAMPLES: ClassVar[str] = "an amount with its currency such as `200000usd` or `1.5M EUR`"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the written form. Raises ValueError with examples of what is accepted."""
        match = cls._FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"expected {cls._EXAMPLES}, got `{text}`")
        scale = {"": 1, "k": 1e3, "M": 1e6}[match[2]]
        amount = float(match[1].replace(",", "").replace("_", "")) * scale
        if not 0 < amount < 1e300:
            raise ValueError(f"expected {cls._EXAMPLES}, got `{text}`")
        return cls(amount, match[3].upper())

    def __str__(self) -> str:
        return f"{_digits(self.amount)} {self.currency}"


def short_bytes(count: float) -> str:
    """Bytes for people: `55.4 GiB`."""
    for suffix, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {suffix}"
    return f"{count:.0f} B"


def short_duration(seconds: float) -> str:
    """Seconds for people, two places at most: `12 s`, `3 min`, `5.2 h`, `12.4 d`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for suffix, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.3g} {suffix}"
    return f"{seconds:.3g} s"


def short_hours(hours: float) -> str:
    """Format GPU-hours with two digits or all before the point: `0.25`, `3.1`, `18,652`."""
    if hours >= 10:
        return f"{hours:,.0f}"
    return f"{hours:.2g}" if hours >= 0.01 else f"{hours:.2f}"
