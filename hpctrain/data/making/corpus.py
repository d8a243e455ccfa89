"""Find and read the input of a dataset: files, directories, the standard library's source.

A text file is one document. Each line of a JSONL file is one document, and the file is read in
pieces of whole lines. Only names and digests stay in memory, so the text may be larger than the
memory. Belongs here: which files are used, in which order, reading them exactly as they are on
disk, and the fields that lines must have. Does not belong here: tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.datasets import DatasetDocument, SkippedFile

LINES_SUFFIX = ".jsonl"
DEFAULT_SUFFIXES = (".txt", ".md", ".rst", ".py", LINES_SUFFIX)
# Not part of what the language's authors wrote as a library, or not there on every system
# (Debian ships the tests in a package of their own).
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_STDLIB_GENERATED = "_sysconfigdata"
_MAX_QUOTED_CHARACTERS = 60


@dataclass(frozen=True)
class InputFile:
    """A file that may become a document; `name` is its name in reports."""

    path: Path
    name: str


class Source(DatasetDocument):
    """Bytes `start` to `start + size_bytes` of a file, not empty; `sha256` is the digest of them.

    Either a whole text file (`first_line` None), or some lines of a JSONL file, of which
    `first_line` is the first (counted from 1).
    """

    path: Path
    name: str
    size_bytes: int
    sha256: str
    start: int = 0
    first_line: int | None = None


@dataclass(frozen=True)
class Corpus:
    """All sources in document order, and the files that were skipped.

    `shards`: one per file that documents come from, however it is cut into pieces.
    """

    sources: tuple[Source, ...]
    skipped: tuple[SkippedFile, ...]
    over_budget_files: int
    digests: tuple[str, ...]

    @property
    def files(self) -> int:
        """Number of files that documents come from."""
        return len(self.digests)

    @property
    def text_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)

    @property
    def sha256(self) -> str:
        """SHA-256 over the files' SHA-256 in order: identifies the text, not its location."""
        text = "".join(f"{digest}\n" for digest in self.digests)
        return hashlib.sha256(text.encode()).hexdigest()


def find_files(inputs: Sequence[Path], suffixes: Sequence[str]) -> list[InputFile]:
    """List the files in `inputs`: files in the given order, directories recursively and sorted.

    `suffixes` select files of directories only. A file that is reached twice counts once. Raises
    InvalidInputError for inputs that do not exist and directories that cannot be read.
    """
    problems: list[Problem] = []
    files: dict[Path, InputFile] = {}
    for path in inputs:
        if path.is_dir():
            below = _walk(path, tuple(suffixes), problems)
        elif path.is_file():
            below = [path]
        else:
            problems.append(Problem("no such file or directory", file=str(path)))
            continue
        for file in below:
            files.setdefault(file.resolve(), InputFile(file, str(file)))
    if problems:
        raise InvalidInputError(problems)
    return list(files.values())


def find_stdlib() -> list[InputFile]:
    """List the Python files of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    problems: list[Problem] = []
    paths = _walk(root, (".py",), problems)
    if problems:
        raise InvalidInputError(problems)
    names = ((path, path.relative_to(root)) for path in paths)
    return [
        InputFile(path, str(name))
        for path, name in names
        if not name.name.startswith(_STDLIB_GENERATED) and _STDLIB_LEFT_OUT.isdisjoint(name.parts)
    ]


def _walk(root: Path, suffixes: tuple[str, ...], problems: list[Problem]) -> list[Path]:
    def record(error: OSError) -> None:
        problems.append(Problem(f"cannot be read: {error.strerror}", file=str(error.filename)))

    names = [
        Path(directory) / name
        for directory, _, files in os.walk(root, onerror=record)
        for name in files
        if name.endswith(suffixes)
    ]
    return sorted(names, key=lambda path: path.relative_to(root).parts)


def read_corpus(
    files: Sequence[InputFile],
    max_bytes: int | None,
    piece_bytes: int,
    *,
    lines: bool | None = None,
) -> Corpus:
    """Read every file once, up to `max_bytes` of text; whole files only, in order.

    The file that would exceed the budget and all after it are counted in `over_budget_files`.
    JSONL files are cut into pieces of about `piece_bytes`. `lines`: whether all files are JSONL;
    None decides by their suffix.
    """
    sources: list[Source] = []
    skipped: list[SkippedFile] = []
    digests: list[str] = []
    budget_bytes = max_bytes
    beyond = 0
    for number, file in enumerate(files):
        has_lines = file.path.suffix == LINES_SUFFIX if lines is None else lines
        checked = _cut_lines(file, piece_bytes) if has_lines else _read_document(file)
        if isinstance(checked, SkippedFile):
            skipped.append(checked)
            continue
        pieces, digest = checked
        if budget_bytes is not None:
            budget_bytes -= sum(source.size_bytes for source in pieces)
            if budget_bytes < 0:
                beyond = len(files) - number
                break
        sources.extend(pieces)
        digests.append(digest)
    return Corpus(tuple(sources), tuple(skipped), beyond, tuple(digests))


_Checked = tuple[list[Source], str] | SkippedFile


def _read_document(file: InputFile) -> _Checked:
    try:
        raw = file.path.read_bytes()
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return SkippedFile(name=file.name, reason=f"not UTF-8 at byte {error.start}")
    except OSError as error:
        return SkippedFile(name=file.name, reason=f"cannot be read: {error.strerror}")
    if not text:
        return SkippedFile(name=file.name, reason="empty")
    if "\0" in text:
        return SkippedFile(name=file.name, reason="binary: holds a zero byte")
    digest = hashlib.sha256(raw).hexdigest()
    path, name = file.path.absolute(), file.name
    return [Source(path=path, name=name, size_bytes=len(raw), sha256=digest)], digest


def _cut_lines(file: InputFile, piece_bytes: int) -> _Checked:
    """Cut a JSONL file into pieces that end with a line; lines are parsed later."""
    pieces: list[Source] = []
    whole = hashlib.sha256()
    start, line = 0, 1
    try:
        with file.path.open("rb") as stream:
            while raw := stream.read(piece_bytes):
                if not raw.endswith(b"\n"):
                    raw += stream.readline()
                piece = Source(
                    path=file.path.absolute(),
                    name=file.name,
                    size_bytes=len(raw),
                    sha256=hashlib.sha256(raw).hexdigest(),
                    start=start,
                    first_line=line,
                )
                pieces.append(piece)
                whole.update(raw)
                start, line = start + len(raw), line + raw.count(b"\n")
    except OSError as error:
        return SkippedFile(name=file.name, reason=f"cannot be read: {error.strerror}")
    if not pieces:
        return SkippedFile(name=file.name, reason="empty")
    return pieces, whole.hexdigest()


def read_text(source: Source) -> str:
    """Read the text of a source. Raises InvalidInputError if its bytes have changed."""
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
    """Group the texts, in order, into lists of about `batch_characters`."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= batch_characters:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# -- JSONL: one JSON object per line, with file and line number for error messages --------------


@dataclass(frozen=True)
class Line:
    """The object of a line; `number` counts from 1."""

    file: str
    number: int
    fields: dict[str, Any]

    def error(self, message: str, hint: str | None = None) -> InvalidInputError:
        """Return an exception that names this line."""
        return InvalidInputError([Problem(message, file=self.file, line=self.number, hint=hint)])

    def text(self, field: str) -> str:
        """Return a field that must be non-empty text. Raises InvalidInputError."""
        value = self.fields.get(field)
        if not isinstance(value, str):
            known = ", ".join(self.fields) or "none"
            raise self.error(f"has no text in field `{field}`; its fields: {known}")
        if not value:
            raise self.error(f"field `{field}` is empty")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            message = f"field `{field}` has half of a surrogate pair, which is no text"
            raise self.error(message) from None
        return value


def read_lines(sources: Iterable[Source]) -> Iterator[Line]:
    """Parse the lines of JSONL pieces; blank lines are skipped. Raises InvalidInputError."""
    for source in sources:
        first = source.first_line or 1
        # not splitlines(): U+2028 and others do not end a line in JSON
        for number, text in enumerate(read_text(source).split("\n"), first):
            if not text.strip():
                continue
            line = Line(source.name, number, {})
            try:
                value = json.loads(text)
            except ValueError as error:
                column = getattr(error, "colno", None)
                problem = Problem(
                    f"is not JSON: {error}", file=line.file, line=number, column=column
                )
                raise InvalidInputError([problem]) from error
            except RecursionError as error:
                raise line.error("is nested too deep") from error
            if not isinstance(value, dict):
                raise line.error(f"is not a JSON object but {text[:_MAX_QUOTED_CHARACTERS]}")
            yield Line(source.name, number, value)


def documents(sources: Iterable[Source], field: str) -> Iterator[str]:
    """Yield the text of each document: a whole file, or a field of each line of a JSONL file.

    Raises InvalidInputError.
    """
    for source in sources:
        if source.first_line is None:
            yield read_text(source)
        else:
            yield from (line.text(field) for line in read_lines([source]))
