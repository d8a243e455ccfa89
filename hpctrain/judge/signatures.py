"""Define the signatures of failures (`signatures.yaml`, `xids.yaml`) and match lines with them.

A line is matched in two steps. First the fixed words of all signatures are searched in the whole
text at once (`str.find` runs at the speed of memory, and healthy logs contain none of them); then
the expressions are matched only against lines with such words, cut to `LONGEST_LINE`. An expression
may hold bounded repeats only and no repeated groups, so its time is linear in the length of a line,
whatever the line. Belongs here: the documents and the matching, pure. Does not belong here: reading
files (`catalogue` for YAML, `log_scan` for logs), what follows from a match (`classify`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import LogFinding, Role
from hpctrain.spec.document import Document

Where = Literal["rank", "srun", "kernel", "script"]
XidClass = Literal["application", "info", "memory", "contained", "lost", "fabric"]

LONGEST_LINE = 2000
# The most ways in which the repeats of one expression can match from one place in a line.
_MOST_WAYS = 10_000
_ESCAPE = re.compile(r"\\.")
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")
_REPEATED_GROUP = re.compile(r"\)\{")
_REPEAT = re.compile(r"\{(\d*),(\d+)\}|(?<!\()\?")
_BACK_REFERENCE = re.compile(r"\\[1-9]|\(\?P=")
_DEFAULT_XID_SOURCE = "docs.nvidia.com/deploy/xid-errors, catalogue of 2025-10"
# NVIDIA kernel modules print `NVRM: Xid (PCI:0000:cb:00): 79, ...`; NVSwitch its own kind.
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]{1,20})\): (\d{1,5})(.{0,300})")
_SXID = re.compile(r"SXid \(PCI:([0-9A-Fa-f:.]{1,20})\): (\d{1,6})(.{0,300})")
_XID_WORDS = ("NVRM: Xid", "SXid")
# The lines of NVLink errors show whether they are fatal: Xid 144-150 and all SXids.
_FATAL = re.compile(r"(?<![Nn]on-)(?<![Nn]on)\bFatal\b")


class Signature(Document):
    """A line that names a cause: it has one of the words `contains`, and matches `regex` if given.

    `teardown`: whatever a rank prints after it follows from its own end.
    """

    id: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="Its name; a site's own replaces it")
    cause: Cause = Field(description="One of the causes of `hpctrain.judge.causes`")
    role: Role = Field(description="root, cascade (follows from another failure) or advice")
    contains: tuple[Annotated[str, Field(min_length=4)], ...] = Field(
        min_length=1, description="Fixed words, one of which is in every such line"
    )
    regex: str = Field(default="", description="What the line must match too; repeats bounded")
    where: tuple[Where, ...] = Field(min_length=1, description="rank, srun, kernel, script")
    hard: bool = Field(default=False, description="Broken hardware beyond doubt")
    teardown: bool = Field(default=False, description="Later lines of this rank do not count")
    enabled: bool = Field(default=True, description="false: a site does without it")
    means: str = Field(default="", description="What a person may look at, after the line")
    source: str = Field(min_length=3, description="Where the text comes from")
    example: str = Field(min_length=4, description="A real line")

    @field_validator("regex")
    @classmethod
    def _is_safe(cls, regex: str) -> str:
        problem = unsafe(regex)
        if problem:
            raise ValueError(problem)
        return regex

    @model_validator(mode="after")
    def _knows_its_example(self) -> Self:
        if not self.matches(self.example):
            raise ValueError("the example does not match: check `contains` and `regex`")
        return self

    def matches(self, line: str) -> re.Match[str] | bool:
        """Match `line`: the match of the expression, True if there is none to match, or False."""
        if not any(words in line for words in self.contains):
            return False
        return (re.search(self.regex, line) or False) if self.regex else True


class Xid(Document):
    """One code of NVIDIA's kernel modules. `line_decides`: the line shows whether it is fatal."""

    code: int = Field(ge=1)
    kind: XidClass = Field(alias="class", description="What has happened to the GPU")
    role: Role
    hard: bool = Field(default=False, description="NVIDIA asks for a reset or a repair")
    cause: Cause = Cause.GPU_ERROR
    line_decides: bool = False
    words: str = Field(min_length=3, description="NVIDIA's description")
    source: str = _DEFAULT_XID_SOURCE


class SignatureFile(Document):
    """`signatures.yaml`."""

    signatures: tuple[Signature, ...]


class XidFile(Document):
    """`xids.yaml`."""

    xids: tuple[Xid, ...] = ()
    sxids: tuple[Xid, ...] = ()


class Signatures(Document):
    """All signatures, the site's own first: of two that match, the first one counts."""

    schema_version: Literal[1] = 1
    signatures: tuple[Signature, ...]
    xids: tuple[Xid, ...]
    sxids: tuple[Xid, ...]

    def to_json(self) -> str:
        """Write the file that the supervisor reads; compute nodes need no YAML."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

    def extended(self, own: SignatureFile | None, xids: XidFile | None) -> Signatures:
        """Add a site's own signatures before the others; the same id or code replaces one."""
        mine = own.signatures if own else ()
        replaced = {one.id for one in mine}
        codes, switch_codes = (xids.xids, xids.sxids) if xids else ((), ())
        return Signatures(
            signatures=(*mine, *(one for one in self.signatures if one.id not in replaced)),
            xids=_merged(self.xids, codes),
            sxids=_merged(self.sxids, switch_codes),
        )

    def matcher(self, where: Where) -> Matcher:
        """Select the signatures for lines of one kind of source."""
        enabled = tuple(one for one in self.signatures if one.enabled)
        return Matcher(
            tuple(one for one in enabled if where in one.where and one.role != "advice"),
            tuple(
                w for s in enabled if s.role == "advice" and where in s.where for w in s.contains
            ),
            {one.code: one for one in self.xids} if where == "kernel" else {},
            {one.code: one for one in self.sxids} if where == "kernel" else {},
        )


@dataclass(frozen=True)
class Matcher:
    """Finds the lines of a text that match a signature."""

    signatures: tuple[Signature, ...]
    advice: tuple[str, ...]
    xids: dict[int, Xid]
    sxids: dict[int, Xid]

    @cached_property
    def _expressions(self) -> tuple[tuple[Signature, re.Pattern[str] | None], ...]:
        return tuple((s, re.compile(s.regex) if s.regex else None) for s in self.signatures)

    @cached_property
    def _words(self) -> tuple[str, ...]:
        words = [word for one in self.signatures for word in one.contains]
        return tuple(dict.fromkeys([*words, *(_XID_WORDS if self.xids else ())]))

    def candidates(self, text: str, most: int) -> Iterator[tuple[int, str]]:
        """Yield the last `most` lines with a known word, in order, each with its offset."""
        places: dict[int, int] = {}
        for word in self._words:
            at = text.find(word)
            while at >= 0:
                start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
                end = len(text) if end < 0 else end
                places[start] = end
                at = text.find(word, end)
        for start in sorted(places)[-most:]:
            yield start, text[start : places[start]]

    def match(self, line: str) -> LogFinding | None:
        """Find the first signature that matches a line; None if no signature does.

        `node` is set where the line itself names one.
        """
        line = line[:LONGEST_LINE]
        if self.xids and any(word in line for word in _XID_WORDS):
            found = _xid(line, _XID, "xid", self.xids) or _xid(line, _SXID, "sxid", self.sxids)
            if found is not None:
                return found
        # Advice quotes errors, so a line is cut where an advice begins.
        text = line
        for advice in self.advice:
            text = text.partition(advice)[0]
        for signature, expression in self._expressions:
            if any(word in text for word in signature.contains):
                found_in = expression.search(text) if expression else None
                if expression is None or found_in:
                    return LogFinding(
                        signature.id,
                        signature.cause,
                        signature.role,
                        line,
                        node=found_in.groupdict().get("node") if found_in else None,
                        hard=signature.hard,
                        teardown=signature.teardown,
                    )
        return None


def unsafe(regex: str) -> str | None:
    """Explain why an expression is refused; None if its time is linear in the line."""
    try:
        re.compile(regex)
    except re.error as error:
        return f"not a regular expression: {error}"
    if _BACK_REFERENCE.search(_CLASS.sub("x", regex)):
        return "it must not refer back to a group"
    bare = _CLASS.sub("x", _ESCAPE.sub("x", regex))
    if _UNBOUNDED.search(bare):
        return "`*`, `+` and `{n,}` have no bound: write for example `.{0,80}`"
    if _REPEATED_GROUP.search(bare):
        return "a group in parentheses must not be repeated"
    # In how many ways the repeats of each alternative can match from one place, at most.
    ways = sum(
        math.prod(
            2 if repeat[2] is None else int(repeat[2]) - int(repeat[1] or 0) + 1
            for repeat in _REPEAT.finditer(alternative)
        )
        for alternative in _alternatives(bare)
    )
    return None if ways <= _MOST_WAYS else f"its repeats match in {ways} ways, at most {_MOST_WAYS}"


def _alternatives(bare: str) -> list[str]:
    """Split an expression at each `|` outside of parentheses."""
    parts, depth = [""], 0
    for letter in bare:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _merged(known: tuple[Xid, ...], own: tuple[Xid, ...]) -> tuple[Xid, ...]:
    return tuple(({one.code: one for one in known} | {one.code: one for one in own}).values())


def _xid(
    line: str, expression: re.Pattern[str], name: str, known: dict[int, Xid]
) -> LogFinding | None:
    """Match a line with an Xid; an unknown code is a GPU error that does not count as hard."""
    found = expression.search(line)
    if found is None:
        return None
    code, rest = int(found[2]), found[3]
    entry = known.get(code)
    if name == "sxid" or (entry is not None and entry.line_decides):
        fatal = _FATAL.search(rest) is not None
        cause = entry.cause if entry else Cause.GPU_ERROR
        role: Role = "root" if fatal else "advice"
        return LogFinding(f"{name}_{code}", cause, role, line, hard=fatal)
    if entry is None:
        return LogFinding(f"{name}_{code}", Cause.GPU_ERROR, "root", line)
    return LogFinding(f"{name}_{code}", entry.cause, entry.role, line, hard=entry.hard)
