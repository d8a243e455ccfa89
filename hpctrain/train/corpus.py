"""Finding the text that a dataset is made of: files, directories, the standard library's source.

One document per file. Belongs here: which files count, in which order, and reading them exactly
as they are on disk. Does not belong here: tokens, torch, megatron. Nothing is held in memory but
names and digests, so the text may be larger than the machine.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.datasets import SkippedFile

DEFAULT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Not part of what the language's authors wrote as a library, or not there on every system
# (Debian ships the tests in a package of their own).
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_STDLIB_GENERATED = "_sysconfigdata"


@dataclass(frozen=True)
class Candidate:
    """A file that may become a document; `name` is how reports call it."""

    path: Path
    name: str


@dataclass(frozen=True)
class Source:
    """A file that is a document: UTF-8, not empty; `sha256` is of its bytes."""

    path: Path
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """All documents in their order, and what was found but is not among them."""

    sources: tuple[Source, ...]
    skipped: tuple[SkippedFile, ...]
    over_budget_files: int

    @property
    def text_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)

    @property
    def sha256(self) -> str:
        """SHA-256 over the documents' SHA-256 in order: says which text, not where it lay."""
        return hashlib.sha256("".join(f"{s.sha256}\n" for s in self.sources).encode()).hexdigest()


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


def read_corpus(candidates: Iterable[Candidate], max_bytes: int | None) -> Corpus:
    """Read every candidate once, up to `max_bytes` of text; whole files only, in order.

    The file that would exceed the budget and all after it are counted in `over_budget_files`.
    """
    sources: list[Source] = []
    skipped: list[SkippedFile] = []
    remaining = list(candidates)
    budget_bytes = max_bytes
    for number, candidate in enumerate(remaining):
        checked = _check(candidate)
        if isinstance(checked, SkippedFile):
            skipped.append(checked)
            continue
        if budget_bytes is not None:
            if checked.size_bytes > budget_bytes:
                return Corpus(tuple(sources), tuple(skipped), len(remaining) - number)
            budget_bytes -= checked.size_bytes
        sources.append(checked)
    return Corpus(tuple(sources), tuple(skipped), 0)


def _check(candidate: Candidate) -> Source | SkippedFile:
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
    return Source(candidate.path, candidate.name, len(raw), hashlib.sha256(raw).hexdigest())


def read_text(source: Source) -> str:
    """The text of one document. Raises InvalidInputError if it is not what it was before."""
    try:
        raw = source.path.read_bytes()
    except OSError as error:
        problem = f"cannot be read any more: {error.strerror}"
        raise InvalidInputError([Problem(problem, file=source.name)]) from error
    if hashlib.sha256(raw).hexdigest() != source.sha256:
        hint = "start again when nobody writes to the input"
        changed = Problem("changed while the dataset was made", file=source.name, hint=hint)
        raise InvalidInputError([changed])
    return raw.decode("utf-8")


def batches(sources: Iterable[Source], batch_bytes: int) -> Iterator[list[str]]:
    """The texts in order, in lists of about `batch_bytes` bytes."""
    texts: list[str] = []
    held_bytes = 0
    for source in sources:
        texts.append(read_text(source))
        held_bytes += source.size_bytes
        if held_bytes >= batch_bytes:
            yield texts
            texts, held_bytes = [], 0
    if texts:
        yield texts
