"""The tutorial as commands with their outputs, compared with what the commands print now.

A fenced `console` block has commands behind `$ ` (further lines behind `> `) and what they print.
`ada$ ` is the prompt of a second user. In an output `…` stands for anything on its line, and a line
with nothing else for any lines. A comment right above a block says more about it, several things
apart by `;`:

    <!-- live -->            numbers that a clock or this machine makes are not compared (`_LIVE`)
    <!-- loose -->           no numbers are compared, nor where lines are broken
    <!-- exit 3 -->          its last command ends with this code
    <!-- until: REGEX -->    repeat it until its output matches, as a person looks again

Belongs here: reading the page, comparing, writing outputs anew. Does not belong here: running.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_ANY = "…"
_PROMPTS = ("$ ", "ada$ ")
# A run's name and what hpctrain appends, which depends on paths.
_RUN_ID = re.compile(r"\b(gpt-tiny|night|shared|gpt175b)-[0-9a-f]{4}\b")
_PAGE_SUFFIX = "7b02"
# What is not compared in a live block: pattern, and what takes its place on both sides.
_LIVE = (
    (r"[\u2800-\u28ff]", ""),  # a curve
    (r"#+", "#"),  # a bar
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE"),
    (r"\d\d:\d\d:\d\d", "TIME"),
    (r"\b\d[\d,]*(\.\d+)?(e-\d+)? ?(ms|s|min|h|d|%|[KMGT]?i?B)(?!\w)", "N"),
    (r"\b\d[\d,]*\.\d+\b", "N"),
    (r"\b[\d,]+ tokens/s", "N tokens/s"),
    (r" +", " "),
)


@dataclass
class Command:
    """One command and the output that the page has; `lines` are those of the output."""

    prompt: str
    text: str
    first_line: int
    lines: list[str] = field(default_factory=list)


@dataclass
class Block:
    """One fenced block."""

    first_line: int
    live: bool = False
    loose: bool = False
    exit_code: int = 0
    until: str | None = None
    commands: list[Command] = field(default_factory=list)


def blocks_of(page: str) -> list[Block]:
    """Read all `console` blocks of a page. Lines are counted from 0."""
    found: list[Block] = []
    lines = page.splitlines()
    inside = False
    for number, line in enumerate(lines):
        if line == "```console":
            inside = True
            found.append(_opened(number, lines[number - 1]))
        elif line.startswith("```"):
            inside = False
        elif inside:
            _take(found[-1], number, line)
    return found


def _opened(number: int, above: str) -> Block:
    comment = re.fullmatch(r"<!-- (.*) -->", above)
    words = [word.strip() for word in comment[1].split(";")] if comment else []
    block = Block(number)
    for word in words:
        if word in ("live", "loose"):
            setattr(block, word, True)
        elif word.startswith("exit "):
            block.exit_code = int(word.removeprefix("exit "))
        else:
            assert word.startswith("until: "), f"line {number}: `{word}` means nothing"
            block.until = word.removeprefix("until: ")
    return block


def _take(block: Block, number: int, line: str) -> None:
    prompt = next((one for one in _PROMPTS if line.startswith(one)), None)
    if prompt is not None:
        block.commands.append(Command(prompt, line.removeprefix(prompt), number))
    elif line.startswith("> "):
        last = block.commands[-1]
        assert not last.lines, f"line {number}: `> ` below an output"
        last.text += "\n" + line.removeprefix("> ")
    else:
        block.commands[-1].lines.append(line)


def shown(output: str, names: Mapping[str, str]) -> list[str]:
    """What a terminal shows of an output, with the names of the page instead of real ones."""
    for real, name in names.items():
        output = output.replace(real, name)
    output = re.sub(r"\x1b\[[0-9;]*m", "", output)  # headings are bold
    output = _RUN_ID.sub(rf"\1-{_PAGE_SUFFIX}", output)
    # a line that was said while somebody waited, and blanked
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in output.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def differs(
    expected: Sequence[str], found: Sequence[str], *, live: bool = False, loose: bool = False
) -> bool:
    """Compare an output of the page with a real one."""
    if loose:
        pattern = ".*".join(re.escape(part) for part in _flowing(expected).split(_ANY))
        return re.fullmatch(pattern, _flowing(found)) is None
    fold: Callable[[str], str] = _without_numbers if live else str
    return not _match([fold(line) for line in expected], [fold(line) for line in found])


def _without_numbers(line: str) -> str:
    for pattern, instead in _LIVE:
        line = re.sub(pattern, instead, line)
    return line.strip()


def _flowing(lines: Sequence[str]) -> str:
    """All words in one line, without numbers, curves and bars."""
    text = _without_numbers(" ".join(lines))
    text = re.sub(r"\b\d[\d,]*\b|(?<= )-(?= |$)", "N", text)
    return " ".join(text.replace("#", "").split()).replace(f" {_ANY} ", _ANY)


def _match(expected: list[str], found: list[str]) -> bool:
    """True if all lines match in order. A line `…` takes as few lines as possible."""
    if not expected:
        return not found
    head, *rest = expected
    if head.strip() == _ANY:
        return any(_match(rest, found[skipped:]) for skipped in range(len(found) + 1))
    if not found:
        return False
    pattern = ".*".join(re.escape(part) for part in head.split(_ANY))
    return re.fullmatch(pattern, found[0]) is not None and _match(rest, found[1:])


def rewritten(page: str, outputs: Mapping[int, Sequence[str]]) -> str:
    """The page with other outputs below the commands that begin at these lines."""
    commands = {one.first_line: one for block in blocks_of(page) for one in block.commands}
    return "\n".join(_lines(page.splitlines(), commands, outputs)) + "\n"


def _lines(
    lines: Sequence[str], commands: Mapping[int, Command], outputs: Mapping[int, Sequence[str]]
) -> Iterator[str]:
    number = 0
    while number < len(lines):
        command = commands.get(number)
        if command is None or number not in outputs:
            yield lines[number]
            number += 1
            continue
        typed = command.text.count("\n") + 1
        yield from lines[number : number + typed]
        yield from outputs[number]
        number += typed + len(command.lines)
