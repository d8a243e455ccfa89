"""Split the text of a bash script into statements and words, without running any of it.

Understood is what job scripts consist of: quotes, continued lines, `$NAME`, `$(...)`, arrays,
pipes, documents behind `<<`. A block (if, loop, function, subshell) is one statement, whose inside
is not looked at. Belongs here: where a statement begins and ends, and the parts of its words. Does
not belong here: values of variables (`variables`), what a statement means (`adoption`).

Source: bash(1), sections QUOTING, SHELL GRAMMAR, EXPANSION and REDIRECTION. The parser bashlex is
GPL 3 and refuses a script as a whole at the first construct that it does not know.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

PartKind = Literal["text", "variable", "command", "arithmetic"]


@dataclass(frozen=True)
class Part:
    """A part of a word: literal text, or what bash would put in.

    Of a variable `text` is its name, and `operator` what stands behind it in braces, such as
    `:-default` or `[@]`; of a command or of arithmetic it is the text inside.
    """

    kind: PartKind
    text: str
    quoted: bool = False
    operator: str = ""


@dataclass(frozen=True)
class Word:
    """One word. `items`: the words of an array that is assigned, `NAME=(...)`."""

    parts: tuple[Part, ...]
    items: tuple[Word, ...] | None = None

    @property
    def literal(self) -> str | None:
        """The text of a word of which bash changes nothing; None for any other word."""
        if self.items is not None or any(part.kind != "text" for part in self.parts):
            return None
        return "".join(part.text for part in self.parts)

    @property
    def bare(self) -> str | None:
        """The text of a word without quotes, as keywords and names of functions are."""
        return None if any(part.quoted for part in self.parts) else self.literal


@dataclass(frozen=True)
class Redirection:
    """Where input comes from or output goes to; `<<` has its document in the lines below."""

    operator: str
    target: Word


@dataclass(frozen=True)
class Statement:
    """A command with its words, or a block, and the lines (from 1) that it stands on.

    `joined` is the operator before it: `&&`, `||`, `|`, or nothing. `block` is the word that opens
    a block, of which the words are not split. `broken`: why the rest cannot be read.
    """

    first_line: int
    last_line: int
    words: tuple[Word, ...] = ()
    redirections: tuple[Redirection, ...] = ()
    joined: str = ""
    background: bool = False
    block: str | None = None
    broken: str | None = None


_CLOSERS = {
    "if": "fi",
    "case": "esac",
    "{": "}",
    "(": ")",
    **dict.fromkeys(("for", "while", "until", "select"), "done"),
}
# Behind these a command begins.
_OPENING = frozenset({"then", "do", "else", "elif", "!", "{", "("})
_OPERATORS: tuple[str, ...] = (
    *("&&", "||", ";;&", ";;", ";&", "|&", "&>>", "&>", "<<<", "<<-", "<<", "<&", ">&", "<>"),
    *(">>", ">|", "<", ">", ";", "|", "&", "(", ")", "\n"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_REDIRECTION = re.compile(r"&>>?|[0-9]*(?:<<<|<<-|<<|<&|>&|<>|>>|>\||<|>)")


@dataclass(frozen=True)
class _Token:
    """An operator, or a word if there is one, from a place of the text up to another one."""

    begin: int
    end: int
    operator: str = ""
    word: Word | None = None


class _UnfinishedError(Exception):
    """A quote or a bracket that is never closed."""


class _Scanner:
    """Reads words and operators from a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.documents: list[str] = []  # words that end the documents behind `<<`, not yet read

    def tokens(self) -> Iterator[_Token]:
        """Yield all tokens but comments. Raises _UnfinishedError."""
        awaited = False  # the word behind `<<`
        while True:
            self._skip_space()
            if self.at >= len(self.text):
                return
            begin, operator = self.at, self._operator()
            if operator == "\n":
                yield _Token(begin, self.at, operator)
                self._skip_documents()
            elif operator:
                awaited = operator.lstrip("0123456789") in ("<<", "<<-")
                yield _Token(begin, self.at, operator)
            else:
                word = self._word()
                if awaited:
                    self.documents.append(word.literal or "")
                awaited = False
                yield _Token(begin, self.at, word=word)

    def _skip_space(self) -> None:
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t\r":
                self.at += 1
            elif text.startswith(("\\\n", "\\\r\n"), self.at):
                self.at = text.index("\n", self.at) + 1
            elif text[self.at] == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def _operator(self) -> str:
        found = _REDIRECTION.match(self.text, self.at)
        if found and not self.text.startswith(("<(", ">("), self.at):
            self.at = found.end()
            return found[0]
        for operator in _OPERATORS:
            if self.text.startswith(operator, self.at):
                self.at += len(operator)
                return operator
        return ""

    def _skip_documents(self) -> None:
        for end in self.documents:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                if line.strip() == end:
                    break
        self.documents.clear()

    def _word(self) -> Word:
        """Read one word; it ends at a space or an operator outside of quotes."""
        parts: list[Part] = []
        text = self.text
        while self.at < len(text) and text[self.at] not in " \t\r\n;&|<>()":
            self._part(parts, quoted=False)
        written = "".join(part.text for part in parts)
        if text.startswith("(", self.at) and _ASSIGNED_ARRAY.fullmatch(written):
            return Word(_joined(parts), self._items())
        if text.startswith("(", self.at) and written and written[-1] in "@?*+!":
            self.at = self._closing(self.at, "(", ")") + 1  # an extended pattern
            parts.append(Part("text", "(...)"))
        return Word(_joined(parts))

    def _items(self) -> tuple[Word, ...]:
        self.at += 1
        items: list[Word] = []
        for token in self.tokens():
            if token.operator == ")":
                return tuple(items)
            if token.word is not None:
                items.append(token.word)
        raise _UnfinishedError("`(` without `)`")

    def _part(self, parts: list[Part], *, quoted: bool) -> None:
        text, char = self.text, self.text[self.at]
        if char == "\\":
            following = text[self.at + 1 : self.at + 2]
            self.at += 2
            if following == "\n":
                return
            kept = "\\" if quoted and following not in '$`"\\' else ""
            parts.append(Part("text", kept + following, True))
        elif char == "'" and not quoted:
            end = self._find("'", self.at + 1)
            parts.append(Part("text", text[self.at + 1 : end], True))
            self.at = end + 1
        elif char == '"' and not quoted:
            self._double_quoted(parts)
        elif char == "`":
            end = self._find("`", self.at + 1)
            parts.append(Part("command", text[self.at + 1 : end], quoted))
            self.at = end + 1
        elif char == "$":
            self._dollar(parts, quoted)
        else:
            parts.append(Part("text", char, quoted))
            self.at += 1

    def _double_quoted(self, parts: list[Part]) -> None:
        begin, before = self.at, len(parts)
        self.at += 1
        while self.at < len(self.text):
            if self.text[self.at] == '"':
                self.at += 1
                parts += [Part("text", "", True)] if len(parts) == before else []
                return
            self._part(parts, quoted=True)
        self.at = begin
        raise _UnfinishedError('a `"` without its end')

    def _dollar(self, parts: list[Part], quoted: bool) -> None:
        text, here = self.text, self.at
        name = _NAME.match(text, here + 1)
        if text.startswith("$((", here):
            end = self._closing(here + 1, "(", ")")
            parts.append(Part("arithmetic", text[here + 3 : end - 1], quoted))
        elif text.startswith("$(", here):
            end = self._closing(here + 1, "(", ")")
            parts.append(Part("command", text[here + 2 : end], quoted))
        elif text.startswith("${", here):
            end = self._closing(here + 1, "{", "}")
            inside = text[here + 2 : end]
            braced = _NAME.match(inside)
            own, operator = (braced[0], inside[braced.end() :]) if braced else (inside[:1], inside)
            parts.append(Part("variable", own, quoted, operator))
        elif name:
            end = name.end() - 1
            parts.append(Part("variable", name[0], quoted))
        elif here + 1 < len(text) and text[here + 1] in "@*#?$!-0123456789":
            end = here + 1
            parts.append(Part("variable", text[end], quoted))
        elif text.startswith("$'", here) and not quoted:
            end = self._find("'", here + 2)
            parts.append(Part("text", text[here + 2 : end], True))
        else:
            end = here
            if not text.startswith('$"', here):
                parts.append(Part("text", "$", quoted))
        self.at = end + 1

    def _find(self, char: str, begin: int) -> int:
        end = self.text.find(char, begin)
        while char == "`" and end > 0 and self.text[end - 1] == "\\":
            end = self.text.find(char, end + 1)
        if end < 0:
            raise _UnfinishedError(f"a `{char}` without its end")
        return end

    def _closing(self, begin: int, opening: str, closing: str) -> int:
        """Return the place of the bracket that closes the one at `begin`."""
        depth, at, text = 0, begin, self.text
        while at < len(text):
            char = text[at]
            if char == "\\":
                at += 1
            elif char == "'" and opening == "(":
                at = self._find("'", at + 1)
            elif char == '"':
                inner = _Scanner(text)
                inner.at = at
                inner._double_quoted([])
                at = inner.at - 1
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if depth == 0:
                    return at
            at += 1
        raise _UnfinishedError(f"`{opening}` without `{closing}`")


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Join neighbouring literal text of the same kind of quotes."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and last.kind == part.kind == "text" and last.quoted == part.quoted:
            found[-1] = replace(last, text=last.text + part.text)
        else:
            found.append(part)
    return tuple(found)


# ----------------------------------------------------------------------------------------------


def statements_of(text: str) -> tuple[Statement, ...]:
    """Split a script into its statements, in order.

    What follows a quote or a block that is never closed is one broken statement.
    """
    tokens: list[_Token] = []
    broken = None
    scanner = _Scanner(text)
    try:
        for token in scanner.tokens():
            tokens.append(token)
    except _UnfinishedError as error:
        broken = str(error)
    starts = [0, *(one.end() for one in re.finditer("\n", text))]

    def line(place: int) -> int:
        return bisect_right(starts, place)

    found: list[Statement] = []
    at, joined = 0, ""
    while at < len(tokens):
        token = tokens[at]
        if token.word is None and token.operator not in ("(",) and not _redirects(token.operator):
            joined = token.operator if token.operator in ("&&", "||", "|", "|&") else joined
            joined = "" if token.operator in (";", "&", ";;") else joined
            at += 1
            continue
        end, block = _end_of(tokens, at)
        body = tokens[at:end]
        words, redirections = _split(body)
        background = end < len(tokens) and tokens[end].operator == "&"
        found.append(
            Statement(
                line(token.begin),
                line(max(body[-1].end - 1, token.begin)),
                words if block is None else (),
                redirections,
                joined,
                background,
                block,
            )
        )
        joined, at = "", end
    found = [_with_documents(one, text) for one in found]
    if broken is not None:
        begin = line(tokens[-1].end if tokens else 0)
        if found and at == len(tokens) and not (tokens and tokens[-1].operator):
            begin = found.pop().first_line  # the block or the words before what is unfinished
        begin = min(begin, line(len(text) - 1))
        found.append(Statement(begin, line(max(len(text.rstrip()) - 1, 0)), broken=broken))
    return tuple(found)


def _redirects(operator: str) -> bool:
    return _REDIRECTION.fullmatch(operator) is not None


def _end_of(tokens: list[_Token], begin: int) -> tuple[int, str | None]:
    """Return the place behind a statement, and the word that opens a block, if it is one."""
    block = _opens(tokens, begin)
    if block is None:
        end = begin
        while end < len(tokens):
            operator = tokens[end].operator
            if operator and not _redirects(operator) and operator not in ("(", ")"):
                return end, None
            end += 1
        return end, None
    stack: list[str] = []
    at, command = begin, True
    while at < len(tokens):
        token = tokens[at]
        bare = token.word.bare if token.word is not None else token.operator
        if command and bare == "[[":
            while at < len(tokens) and getattr(tokens[at].word, "bare", None) != "]]":
                at += 1
            command = False
        elif stack and bare == stack[-1] and (command or bare == ")"):
            stack.pop()
            command = False
            if not stack:
                if not _body_follows(tokens, at, block):
                    at += 1
                    while at + 1 < len(tokens) and _redirects(tokens[at].operator):
                        at += 2
                    return at, block
                command = True
        elif bare in _CLOSERS and (command or bare == "(" or (block == "function" and not stack)):
            if bare == "(" and not command and stack and stack[-1] == "esac":
                pass  # before a pattern
            else:
                stack.append(_CLOSERS[bare])
            command = bare in _OPENING or bare in ("while", "until", "if")
        elif token.word is None:
            command = not _redirects(token.operator)
        else:
            command = command and (bare in _OPENING or bare == "function")
            if bare in _OPENING:
                command = True
        at += 1
    return at, block


def _opens(tokens: list[_Token], at: int) -> str | None:
    """Return the word with which a block begins here: its keyword, or `function`."""
    token = tokens[at]
    bare = token.word.bare if token.word is not None else token.operator
    if bare == "function":
        return "function"
    following = [one.operator for one in tokens[at + 1 : at + 3]]
    if token.word is not None and following == ["(", ")"] and bare:
        return "function"
    return bare if bare in _CLOSERS else None


def _body_follows(tokens: list[_Token], at: int, block: str | None) -> bool:
    """Whether this closes only the `()` of a function, whose body is still to come."""
    if block != "function" or tokens[at].operator != ")":
        return False
    rest = [one for one in tokens[at + 1 : at + 4] if one.operator != "\n"]
    word = rest[0].word if rest else None
    return word is not None and word.bare in _CLOSERS


def _split(body: list[_Token]) -> tuple[tuple[Word, ...], tuple[Redirection, ...]]:
    words: list[Word] = []
    redirections = []
    at = 0
    while at < len(body):
        token = body[at]
        if token.word is not None:
            words.append(token.word)
        elif _redirects(token.operator) and at + 1 < len(body) and body[at + 1].word is not None:
            at += 1
            target = body[at].word
            assert target is not None
            redirections.append(Redirection(token.operator, target))
        at += 1
    return tuple(words), tuple(redirections)


def _with_documents(statement: Statement, text: str) -> Statement:
    """Add the lines of the documents behind `<<` to a statement outside of blocks."""
    lines = text.splitlines()
    last = statement.last_line
    for one in statement.redirections:
        if one.operator.lstrip("0123456789") not in ("<<", "<<-"):
            continue
        end = one.target.literal or ""
        for number in range(last, len(lines)):
            if lines[number].strip() == end:
                break
        else:
            number = len(lines) - 1
        last = number + 1
    return replace(statement, last_line=last)
