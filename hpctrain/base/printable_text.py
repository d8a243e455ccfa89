"""Turn text from files, logs and people into one printable line.

Such text is shown on terminals and stands in ledgers and scripts, where a control character or a
line break would mean something else. Imports nothing of ours.
"""

from __future__ import annotations


def printable_line(text: str, longest: int | None = None) -> str:
    """Join the words of `text` by single blanks and replace every other character by `?`.

    The result is cut to `longest` characters.
    """
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)[:longest]
