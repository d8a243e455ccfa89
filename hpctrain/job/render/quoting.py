"""Quotes values for bash and for #SBATCH lines; the template's filters do it once."""

from __future__ import annotations

import re
import shlex

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.job_text import Expansion, job_text_parts


def sh(value: object) -> str:
    """Quote one argument of a POSIX shell command; `shlex.quote` handles everything but NUL."""
    text = str(value)
    if "\0" in text:
        raise InvalidInputError([Problem("a value contains a NUL character")])
    return shlex.quote(text)


def sh_expanded(text: str) -> str:
    """Quote one argument whose variables bash puts in when the job runs; all else is literal.

    A variable that the job does not have ends it (POSIX.1-2017, 2.6.2, `:?`), because an empty one
    would make `$SCRATCH/cache` a directory of the root. Which field has it, says the check of
    `hpctrain.job.render.environment` that stands before.
    """
    parts = job_text_parts(text)
    if not any(isinstance(part, Expansion) for part in parts):
        return sh("".join(map(str, parts)))
    if "\0" in text:
        raise InvalidInputError([Problem("a value contains a NUL character")])
    quoted = []
    for part in parts:
        if isinstance(part, Expansion):
            quoted.append(f"${{{part.name}{'' if part.name == 'PWD' else ':?'}}}")
        else:
            quoted.append(re.sub(r'([\\"$`])', r"\\\1", part))
    return f'"{"".join(quoted)}"'


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
