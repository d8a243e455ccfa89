"""Text with values that exist in the job only: `$SCRATCH/cache/${SLURM_JOB_ID}`.

Belongs here: which texts are allowed, and their parts. Does not belong here: quoting for bash
(`hpctrain.job.render.quoting`). Nothing else is ever evaluated: no command, no arithmetic, no
pattern.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

# POSIX.1-2017, 2.6.2 Parameter Expansion: only the two plain forms of a name.
_PARTS = re.compile(
    r"\$(?P<bare>[A-Za-z_][A-Za-z0-9_]*)|\$\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\}|(?P<dollar>\$\$)"
)


@dataclass(frozen=True)
class Expansion:
    """A variable whose value the job puts in its place."""

    name: str


def job_text_parts(text: str) -> tuple[str | Expansion, ...]:
    """Split a text into literal parts and variables; `$$` is one literal dollar sign.

    Raises ValueError for any other dollar sign.
    """
    parts: list[str | Expansion] = []
    end = 0
    for found in _PARTS.finditer(text):
        parts.append(_literal(text[end : found.start()]))
        name = found["bare"] or found["braced"]
        parts.append(Expansion(name) if name else "$")
        end = found.end()
    parts.append(_literal(text[end:]))
    return tuple(part for part in parts if part != "")


def expanded_names(text: str) -> tuple[str, ...]:
    """List the variables of a text in their order, each once."""
    names = [part.name for part in job_text_parts(text) if isinstance(part, Expansion)]
    return tuple(dict.fromkeys(names))


def literal_text(text: str) -> str | None:
    """Return the text that the job will see, or None where it depends on the job."""
    parts = job_text_parts(text)
    return None if any(isinstance(part, Expansion) for part in parts) else "".join(map(str, parts))


def _literal(text: str) -> str:
    if "$" in text:
        raise ValueError(
            "only variables are expanded, `$NAME` or `${NAME}`, and no command or pattern is run: "
            "write `$$` for a dollar sign"
        )
    return text


def _checked(text: str) -> str:
    job_text_parts(text)
    return text


JobText = Annotated[str, AfterValidator(_checked)]
