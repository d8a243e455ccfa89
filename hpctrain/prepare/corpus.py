"""Finding what a dataset is made of: files, directories, the standard library's source.

A file of text is one document; of a JSONL file each line is one, and the file is read in pieces
of whole lines. Belongs here: which files count, in which order, and reading them exactly as they
are on disk. Does not belong here: tokens, what a line holds. Nothing is held in memory but names
and digests, so the text may be larger than the machine.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.datasets import SkippedFile

LINES_SUFFIX = ".jsonl"
DEFAULT_SUFFIXES = (".txt", ".md", ".rst", ".py", LINES_SUFFIX)
# Not part of what the language's authors wrote as a library, or not there on every system
# (Debian ships the tests in a package of their own).
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_STDLIB_GENERATED = "_sysconfigdata"


@dataclass(frozen=True)
class Candidate:
    """A file that may become a document; `name` is how reports call it."""

    path: Path
    name: str


class Source(BaseModel):
    """Bytes `start` to `start + size_bytes` of a file: UTF-8, not empty; `sha256` is theirs.

    The whole of a file that is one document; of a JSONL file some lines, `first_line` of which is
    the first (counted from 1).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    name: str
    size_bytes: int
    sha256: str
    start: int = 0
    first_line: int | None = None


@dataclass(frozen=True)
class Corpus:
    """All documents in their order, and what was found but is not among them.

    `digests`: one of each file that documents come from, however it is cut into pieces.
    """

    sources: tuple[Source, ...]
    skipped: tuple[SkippedFile, ...]
    over_budget_files: int
    digests: tuple[str, ...]

    @property
    def files(self) -> int:
        """Files that documents come from."""
        return len(self.digests)

    @property
    def text_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)

    @property
    def sha256(self) -> str:
        """SHA-256 over the files' SHA-256 in order: says which text, not where it lay."""
        return hashlib.sha256("".join(f"{one}\n" for one in self.digests).encode()).hexdigest()


def find_files(inputs: Sequence[Path], suffixes: Sequence[str]) -> list[Candidate]:
    """The files among `inputs` as they are, directories recursively by suffix and sorted.

    A file that is reached twice counts once. Raises InvalidInputError for inputs that do not
    exist and directories that cannot be read.
    """
    problems: list[Problem] = []
    found: dict[Path, Candidate] = {}
    for given in inputs:
        if given.is_dir():
            names = _walk(given, tuple(suffixes), problems)
        elif given.is_file():
            names = [given]
        else:
            problems.append(Problem("no such file or directory", file=str(given)))
            continue
        for path in names:
            found.setdefault(path.resolve(), Candidate(path, str(path)))
    if problems:
        raise InvalidInputError(problems)
    return list(found.values())


def find_stdlib() -> list[Candidate]:
    """The Python source of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    problems: list[Problem] = []
    paths = _walk(root, (".py",), problems)
    if problems:
        raise InvalidInputError(problems)
    names = ((path, path.relative_to(root)) for path in paths)
    return [Candidate(path, str(name)) for path, name in names if _is_library_source(name)]


def _is_library_source(name: Path) -> bool:
    generated = name.name.startswith(_STDLIB_GENERATED)
    return not generated and _STDLIB_LEFT_OUT.isdisjoint(name.parts)


def _walk(root: Path, suffixes: tuple[str, ...], problems: list[Problem]) -> list[Path]:
    def note(error: OSError) -> None:
        problems.append(Problem(f"cannot be read: {error.strerror}", file=str(error.filename)))

    names = [
        Path(directory) / name
        for directory, _, files in os.walk(root, onerror=note)
        for name in files
        if name.endswith(suffixes)
    ]
    return sorted(names, key=lambda path: path.relative_to(root).parts)


def read_corpus(
    candidates: Iterable[Candidate],
    max_bytes: int | None,
    piece_bytes: int,
    *,
    lines: bool | None = None,
) -> Corpus:
    """Read every candidate once, up to `max_bytes` of text; whole files only, in order.

    The file that would exceed the budget and all after it are counted in `over_budget_files`.
    JSONL files come in pieces of about `piece_bytes`; `lines` None: those are by their suffix.
    """
    sources: list[Source] = []
    skipped: list[SkippedFile] = []
    digests: list[str] = []
    remaining = list(candidates)
    budget_bytes = max_bytes
    beyond = 0
    for number, candidate in enumerate(remaining):
        has_lines = candidate.path.suffix == LINES_SUFFIX if lines is None else lines
        checked = _check_lines(candidate, piece_bytes) if has_lines else _check(candidate)
        if isinstance(checked, SkippedFile):
            skipped.append(checked)
            continue
        pieces, digest = checked
        if budget_bytes is not None:
            budget_bytes -= sum(source.size_bytes for source in pieces)
            if budget_bytes < 0:
                beyond = len(remaining) - number
                break
        sources.extend(pieces)
        digests.append(digest)
    return Corpus(tuple(sources), tuple(skipped), beyond, tuple(digests))


_Checked = tuple[list[Source], str] | SkippedFile


def _check(candidate: Candidate) -> _Checked:
    try:
        raw = candidate.path.read_bytes()
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return SkippedFile(name=candidate.name, reason=f"not UTF-8 at byte {error.start}")
    except OSError as error:
        return SkippedFile(name=candidate.name, reason=f"cannot be read: {error.strerror}")
    if not text:
        return SkippedFile(name=candidate.name, reason="empty")
    if "\0" in text:
        return SkippedFile(name=candidate.name, reason="binary: holds a zero byte")
    digest = hashlib.sha256(raw).hexdigest()
    path, name = candidate.path.absolute(), candidate.name
    return [Source(path=path, name=name, size_bytes=len(raw), sha256=digest)], digest


def _check_lines(candidate: Candidate, piece_bytes: int) -> _Checked:
    """Pieces that end with a line. What their lines hold is looked at when they are read."""
    pieces: list[Source] = []
    whole = hashlib.sha256()
    start, line = 0, 1
    try:
        with candidate.path.open("rb") as stream:
            while raw := _whole_lines(stream, piece_bytes):
                piece = Source(
                    path=candidate.path.absolute(),
                    name=candidate.name,
                    size_bytes=len(raw),
                    sha256=hashlib.sha256(raw).hexdigest(),
                    start=start,
                    first_line=line,
                )
                pieces.append(piece)
                whole.update(raw)
                start, line = start + len(raw), line + raw.count(b"\n")
    except OSError as error:
        return SkippedFile(name=candidate.name, reason=f"cannot be read: {error.strerror}")
    if not pieces:
        return SkippedFile(name=candidate.name, reason="empty")
    return pieces, whole.hexdigest()


def _whole_lines(stream: IO[bytes], piece_bytes: int) -> bytes:
    raw = stream.read(piece_bytes)
    return raw if raw.endswith(b"\n") or not raw else raw + stream.readline()


def read_text(source: Source) -> str:
    """The text of a source. Raises InvalidInputError if it is not what it was before."""
    try:
        with source.path.open("rb") as stream:
            stream.seek(source.start)
            raw = stream.read(source.size_bytes)
            longer = source.first_line is None and stream.read(1)
    except OSError as error:
        problem = f"cannot be read any more: {error.strerror}"
        raise InvalidInputError([Problem(problem, file=source.name)]) from error
    if longer or hashlib.sha256(raw).hexdigest() != source.sha256:
        hint = "start again when nobody writes to the input"
        changed = Problem("changed while the dataset was made", file=source.name, hint=hint)
        raise InvalidInputError([changed])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = (source.first_line or 1) + raw.count(b"\n", 0, error.start)
        raise InvalidInputError([Problem("is not UTF-8", file=source.name, line=line)]) from error


def batches(texts: Iterable[str], batch_characters: int) -> Iterator[list[str]]:
    """The texts in order, in lists of about `batch_characters`."""
    held: list[str] = []
    characters = 0
    for text in texts:
        held.append(text)
        characters += len(text)
        if characters >= batch_characters:
            yield held
            held, characters = [], 0
    if held:
        yield held
