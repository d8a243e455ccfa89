"""Find the questions in a profile or spec that its user has not answered yet.

`profile detect` writes a harmless value with a comment `# ASK: ...` where only the user knows a
better one, and `adopt` the value `ASK`, which no spec may have. Whoever answers removes the
comment. Belongs here: the mark, and finding it. Does not belong here: which questions are asked
(`hpctrain.site`, `hpctrain.adopt`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.base.errors import Problem
from hpctrain.spec.positions import Parsed, Path, dotted

ASK = "ASK:"
_UNANSWERED = re.compile(r"\bASK\b")
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


def unanswered(parsed: Parsed) -> Iterator[tuple[Path, Problem]]:
    """Yield the values of a document that are still `ASK`, in whole or as a word of theirs."""
    left: list[tuple[Path, object]] = [((), parsed.data)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [((*path, key), one) for key, one in value.items()]
        elif isinstance(value, list):
            left += [((*path, index), one) for index, one in enumerate(value)]
        elif isinstance(value, str) and _UNANSWERED.search(value) and path in parsed.values:
            message = f"`{dotted(path)}`: a question is open here"
            hint = "put your value in place of ASK; the comment asks for it"
            yield path, parsed.values[path].problem(message, hint)


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
