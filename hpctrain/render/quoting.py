"""Quotes values for bash and for #SBATCH lines; the template's `sh` filter does it once."""

from __future__ import annotations

import shlex

from hpctrain.errors import InvalidInputError, Problem


def sh(value: object) -> str:
    """Quote one argument of a POSIX shell command; `shlex.quote` handles everything but NUL."""
    text = str(value)
    if "\0" in text:
        raise InvalidInputError([Problem("a value contains a NUL character")])
    return shlex.quote(text)


def directive_value(option: str, value: str) -> str:
    """Quote the value of one #SBATCH line.

    sbatch splits these lines itself (src/sbatch/opt.c, `_next_line` and `_get_argument`): quotes
    and backslashes work, but a line break would end the directive, so it is refused.
    """
    if any(character in value for character in "\n\r\0"):
        problem = Problem(
            f"{option}: a line break is not possible in a value for sbatch: {value!r}"
        )
        raise InvalidInputError([problem])
    if all(character.isalnum() or character in "_-+=./:,@%" for character in value) and value:
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
