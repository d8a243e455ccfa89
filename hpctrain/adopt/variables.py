"""Put the literal values of a script's variables into its words, without running anything.

A value that only the job knows stays a reference (`$SLURM_JOB_ID`), one that a command would print
stays unknown. Belongs here: what bash would put in place of a word. Does not belong here: where
words begin (`bash_text`), what they mean (`adoption`).

Source: bash(1), EXPANSION: parameters, arithmetic, word splitting.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from hpctrain.adopt.bash_text import Part, Word, statements_of

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEFAULT = re.compile(r":?[-=](.*)", re.DOTALL)
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_IN_BLOCK = re.compile(
    r"(?:^|[;&|]|\bthen|\bdo|\belse)[ \t]*"
    r"(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?"
    r"([A-Za-z_]\w*)\+?=",
    re.MULTILINE,
)
# What is a directory of the script's own: where it was submitted, and after `cd` there.
_HERE = re.compile(r"pwd( -P)?|realpath \.|readlink -f \.")


@dataclass(frozen=True)
class Piece:
    """A piece of a text: literal, a variable of the job (`name`), or not to be known (`unknown`).

    `unknown` is what bash would run or look up for it.
    """

    text: str = ""
    name: str = ""
    unknown: str = ""


Text = tuple[Piece, ...]


@dataclass(frozen=True)
class Variable:
    """A value that the script has given, and the block in which it may be changed (first line)."""

    words: tuple[Text, ...]
    is_array: bool = False
    exported: bool = False
    line: int = 0
    changed_at: int | None = None


@dataclass
class Variables:
    """The variables of a script as far as it has been read.

    `directory`: where the script runs, for `$PWD`. `defaults` are the variables whose `:-default`
    was taken. `behind` has for each variable those that its value was made of, and `touched` those
    that were looked up since it was emptied.
    """

    directory: str
    given: dict[str, Variable] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    behind: dict[str, set[str]] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)

    def assign(self, name: str, word: Word, *, line: int, exported: bool, add: bool) -> None:
        """Give a variable the value of a word behind `NAME=`, or add it (`+=`)."""
        old = self.given.get(name)
        self.touched.clear()
        if word.items is not None:
            words = tuple(text for item in word.items for text in self.split(item))
        else:
            words = (self.joined(word.parts),)
        if add and old is not None:
            self.touched.add(name)
            words = (*old.words, *words) if old.is_array else ((*old.words[0], *words[0]),)
        behind = self.behind.get(name, set()) if name in self.touched else set()
        self.behind[name] = self.touched | behind
        is_array = word.items is not None or (add and old is not None and old.is_array)
        exported = exported or (old is not None and old.exported)
        self.given[name] = Variable(words, is_array, exported, line)

    def export(self, name: str, line: int) -> None:
        """Mark a variable as one of the environment."""
        if name in self.given:
            self.given[name] = replace(self.given[name], exported=True, line=line)

    def doubt(self, text: str, line: int) -> None:
        """Note which variables a block may change: their values are not known behind it."""
        for name in _IN_BLOCK.findall(text):
            old = self.given.get(name, Variable(_of_block(name), line=line))
            self.given[name] = replace(old, changed_at=line)

    def used(self) -> set[str]:
        """Return the variables looked up since `touched` was emptied, and those behind them."""
        found: set[str] = set()
        left = set(self.touched)
        while left:
            name = left.pop()
            found.add(name)
            left |= self.behind.get(name, set()) - found
        return found

    def joined(self, parts: Iterable[Part]) -> Text:
        """Return what a word becomes where bash splits none: behind `=`, and in quotes."""
        pieces: list[Piece] = []
        parts = tuple(parts)
        for part in parts:
            words = self._values(part, alone=len(parts) == 1)
            for number, text in enumerate(words):
                pieces += [Piece(" ")] * bool(number) + list(text)
        return _merged(_home(pieces, parts))

    def split(self, word: Word) -> list[Text]:
        """Return the words that a word becomes; an empty variable without quotes becomes none."""
        flat: list[Piece | None] = []  # None: here one word ends
        for part in word.parts:
            several = not part.quoted or part.operator.startswith("[@]")
            for number, text in enumerate(self._values(part, alone=len(word.parts) == 1)):
                if number:
                    flat.append(None if several else Piece(" "))
                if part.kind == "text" or part.quoted:
                    flat += text or (Piece(),)
                else:
                    flat += _split_at_spaces(text)
        words: list[list[Piece]] = [[]]
        for piece in flat:
            if piece is None:
                words.append([])
            else:
                words[-1].append(piece)
        words = [one for one in words if one]
        if words:
            words[0] = _home(words[0], word.parts)
        return [_merged(one) for one in words]

    def _values(self, part: Part, *, alone: bool) -> list[Text]:
        if part.kind == "text":
            return [(Piece(part.text),)]
        if part.kind == "variable":
            found, given = self._variable(part), self.given.get(part.text)
            empty = given is not None and given.changed_at is not None and found == [()]
            return [(Piece(unknown=f"${part.text}"),)] if empty and not alone else found
        if part.kind == "command" and _HERE.fullmatch(part.text.strip()):
            return [(Piece(self.directory),)]
        if part.kind == "arithmetic":
            number = self._number(part.text)
            return [(Piece(number) if number else Piece(unknown=f"$(({part.text}))"),)]
        return [(Piece(unknown=f"$({part.text})"),)]

    def _variable(self, part: Part) -> list[Text]:
        name, behind = part.text, part.operator
        self.touched.add(name)
        shown = f"${{{name}{behind}}}" if behind else f"${name}"
        given = self.given.get(name)
        default = _DEFAULT.fullmatch(behind)
        if name in ("PWD", "SLURM_SUBMIT_DIR") and not given and (not behind or default):
            return [(Piece(self.directory),)]
        if given is not None and default is not None and given.words == _of_block(name):
            given = None
        if given is None and default is not None and _NAME.fullmatch(name):
            inner = self._inner(default[1])
            self.defaults[name] = _plain(inner)
            if "=" in behind[:2]:
                self.given[name] = Variable((inner,))
            return [inner]
        if behind and default is None and behind not in ("[@]", "[*]"):
            return [(Piece(unknown=shown),)]
        if given is None:
            known = _NAME.fullmatch(name) and behind not in ("[@]", "[*]")
            return [(Piece(name=name) if known else Piece(unknown=shown),)]
        if default and behind.startswith(":") and given.words == ((),):
            return [self._inner(default[1])]
        if given.is_array and behind not in ("[@]", "[*]"):
            return [given.words[0]] if given.words else [()]
        return list(given.words)

    def _inner(self, text: str) -> Text:
        """Return the value of the default of a variable, which is a word of its own."""
        found = [word for one in statements_of(f"_={text}") for word in one.words]
        if not found:
            return ()
        first = found[0].parts
        parts = (replace(first[0], text=first[0].text.removeprefix("_=")), *first[1:])
        more = [Part("text", " "), *[p for word in found[1:] for p in word.parts]]
        return self.joined((*parts, *more[: None if found[1:] else 0]))

    def _number(self, text: str) -> str | None:
        """Compute arithmetic of numbers that are all known."""

        def value(match: re.Match[str]) -> str:
            texts = self._variable(Part("variable", match[1]))
            plain = _plain(texts[0]) if texts else ""
            return plain if plain.isdecimal() else "unknown"

        try:
            names = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\}?")
            tree = ast.parse(names.sub(value, text).replace("/", "//").strip(), mode="eval")
            return str(_computed(tree.body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _of_block(name: str) -> tuple[Text, ...]:
    """The value of a variable that only a block sets."""
    return ((Piece(unknown=f"${name}"),),)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        found = _ARITHMETIC[type(node.op)](_computed(node.left), _computed(node.right))
        return int(found)
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**63:
        return node.value
    raise ValueError


def _home(pieces: list[Piece], parts: Iterable[Part]) -> list[Piece]:
    """Put the variable in place of a `~` at the beginning of a word, outside of quotes."""
    first = next(iter(parts), None)
    tilde = first is not None and not first.quoted and re.match(r"~(/|$)", first.text)
    assigned = first is not None and not first.quoted and re.match(r"\w+=~(/|$)", first.text)
    if not pieces or not (tilde or assigned):
        return pieces
    before, _, rest = pieces[0].text.partition("~")
    return [Piece(before), Piece(name="HOME"), Piece(rest), *pieces[1:]]


def _split_at_spaces(text: Text) -> Iterator[Piece | None]:
    for piece in text:
        if piece.name or piece.unknown:
            yield piece
            continue
        for run in re.findall(r"\s+|\S+", piece.text):
            yield None if run.isspace() else Piece(run)


def _merged(pieces: Iterable[Piece]) -> Text:
    found: list[Piece] = []
    for piece in pieces:
        literal = not piece.name and not piece.unknown
        if literal and not piece.text:
            continue
        if literal and found and not found[-1].name and not found[-1].unknown:
            found[-1] = Piece(found[-1].text + piece.text)
        else:
            found.append(piece)
    return tuple(found)


def _plain(text: Text) -> str:
    return "".join(piece.text or piece.unknown or f"${piece.name}" for piece in text)


def shell_text(text: Text) -> str:
    """Return a text as a shell would read it again: in `bash -c TEXT` or `eval TEXT`."""
    return "".join(piece.text or piece.unknown or f"${{{piece.name}}}" for piece in text)


def literal_of(text: Text) -> str | None:
    """Return the text of a word of which everything is known."""
    whole = all(not piece.name and not piece.unknown for piece in text)
    return "".join(piece.text for piece in text) if whole else None


def job_text(text: Text) -> str:
    """Return a word as JobText: `$NAME` where the job puts something in, `$$` for a dollar sign.

    What is not to be known must have been replaced.
    """
    found = []
    for piece, following in zip(text, (*text, Piece())[1:], strict=True):
        assert not piece.unknown, "a value that nobody knows is a question"
        braces = re.match(r"\w", following.text) is not None
        name = f"${{{piece.name}}}" if braces else f"${piece.name}"
        found.append(name if piece.name else piece.text.replace("$", "$$"))
    return "".join(found)


def names_in(text: Text) -> Iterator[str]:
    """Yield the variables that the job puts in."""
    yield from (piece.name for piece in text if piece.name)


def unknown_in(text: Text) -> str | None:
    """Return what would have to be run or looked up to know the text; None if nothing."""
    return next((piece.unknown for piece in text if piece.unknown), None)
