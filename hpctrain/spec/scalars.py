"""Resolve unquoted YAML scalars: text, number, boolean or null (YAML 1.2.2, 10.3.2).

Belongs here: the core schema, and the few spellings that are refused because YAML readers disagree
on them. Does not belong here: positions and nesting (see `positions`), field types. The rules do
not depend on the YAML library: neither a `%YAML 1.1` line nor another version of the library can
turn `24:00:00` into a number.
"""

from __future__ import annotations

import math
import re

_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_MAX_DIGITS = 30  # no field needs more, and int() of a very long text takes quadratic time

Scalar = str | int | float | bool | None


class AmbiguousScalarError(ValueError):
    """A refused unquoted scalar; `hint` gives the unambiguous spelling."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def plain_scalar(text: str) -> Scalar:
    """Resolve an unquoted scalar. Raises AmbiguousScalarError for `012`, `.nan` and `1e999`."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INTEGER.fullmatch(text) or _OCTAL_OR_HEX.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            message = f"a number of {len(text)} digits is too long"
            raise AmbiguousScalarError(message, "quote it if it is text")
        if _LEADING_ZERO.fullmatch(text):
            bare = text.lstrip("+-").lstrip("0") or "0"
            raise AmbiguousScalarError(
                f"`{text}` starts with a zero, which some YAML readers take as octal",
                f'write `{bare}` for the number, or `"{text}"` for the text',
            )
        return int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        raise AmbiguousScalarError(f"`{text}` is not a usable number", "write a finite number")
    if not _FLOAT.fullmatch(text):
        return text
    value = float(text)
    if math.isinf(value):
        raise AmbiguousScalarError(f"`{shorten(text)}` is too large", "write a finite number")
    return value


def shorten(text: str, limit: int = 60) -> str:
    """Prepare text for a message: escape control characters, truncate to `limit` characters."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
