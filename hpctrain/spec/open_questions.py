"""Find the questions in the text of a profile that its user has not answered yet.

`profile detect` writes a harmless value with a comment `# ASK: ...` where only the user knows a
better one. Whoever answers removes the comment. Belongs here: the mark, and finding it. Does not
belong here: which questions are asked (`hpctrain.site`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpctrain.base.errors import Problem

ASK = "ASK:"
_QUESTION = re.compile(rf"(?:^|\s)# ?{ASK}\s*(.*)")
_KEY = re.compile(r"\s*(?:- )*([A-Za-z_]\w*):")


@dataclass(frozen=True)
class OpenQuestion:
    """A question, and the line of the value that it is about."""

    line: int
    key: str
    question: str

    def problem(self, file: str) -> Problem:
        return Problem(f"`{self.key}`: {self.question}", file=file, line=self.line)


def open_questions(text: str) -> tuple[OpenQuestion, ...]:
    """List the questions of a profile: behind a value, or in the comment above it."""
    found: list[OpenQuestion] = []
    above: list[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        is_comment, match = line.lstrip().startswith("#"), _QUESTION.search(line)
        key = _KEY.match(line)
        if is_comment and match:
            above = [match[1]]
        elif is_comment and above is not None:
            above.append(line.strip().lstrip("# "))
        elif key is not None:
            if match or above:
                question = match[1] if match else " ".join(above or ())
                found.append(OpenQuestion(number, key[1], question))
            above = None
    return tuple(found)
