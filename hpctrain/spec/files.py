"""Read the text of YAML files of users, of pipes, and of this package.

Belongs here: limits, encodings, what is waited for, and the JSON beside packaged files. Does not
belong here: what a text means (`loader`, `positions`). pydantic is imported by whoever has a
document.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hpctrain.base import clock
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.positions import SourcePlace, parse_yaml

if TYPE_CHECKING:
    from pydantic import BaseModel

DocumentT = TypeVar("DocumentT", bound="BaseModel")
MAX_FILE_BYTES = 2**20
_WRITER_SECONDS, _POLL_SECONDS = 5.0, 0.05  # how long a pipe without a writer is waited for
# What pipes and standard input had, for whoever reads the same document again: they have it once.
_READ_ONCE: dict[object, bytes] = {}
_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def shown_name(path: Path | str) -> str:
    """Name a file as in messages; `-` is standard input."""
    return "stdin" if str(path) == "-" else str(path)


def read_text(path: Path | str) -> str:
    """Read at most MAX_FILE_BYTES of a file; `-` is standard input. Raises InvalidInputError."""
    file = shown_name(path)
    try:
        raw = _read_bytes(path)
    except OSError as error:
        raise InvalidInputError([_unreadable(Path(path), error)]) from None
    if len(raw) > MAX_FILE_BYTES:
        problem = SourcePlace(file).problem(
            f"larger than {MAX_FILE_BYTES // 2**20} MiB, is this a spec?"
        )
        raise InvalidInputError([problem])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        before = raw[raw.rfind(b"\n", 0, error.start) + 1 : error.start].decode("utf-8-sig")
        message = f"byte 0x{raw[error.start]:02X} is not UTF-8"
        problem = SourcePlace(file, line, len(before) + 1).problem(
            message, "save the file as UTF-8"
        )
        raise InvalidInputError([problem]) from None


def _read_bytes(path: Path | str) -> bytes:
    if str(path) == "-":
        if sys.stdin not in _READ_ONCE:
            _READ_ONCE[sys.stdin] = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        return _READ_ONCE[sys.stdin]
    if stat.S_ISFIFO(os.stat(path).st_mode):
        return _read_pipe(path)
    with open(path, "rb") as stream:
        return stream.read(MAX_FILE_BYTES + 1)


def _read_pipe(path: Path | str) -> bytes:
    """Read a pipe to its end, or return what it had before. Raises InvalidInputError.

    A writer may take its time. Nobody who has it open is no writer: `open` would wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        key = os.path.realpath(path), status.st_dev, status.st_ino
        deadline = clock.monotonic() + (0 if key in _READ_ONCE else _WRITER_SECONDS)
        raw, written = b"", False
        while len(raw) <= MAX_FILE_BYTES:
            try:
                part = os.read(descriptor, MAX_FILE_BYTES + 1 - len(raw))
            except BlockingIOError:  # somebody has it open, and has written nothing yet
                written = True
                select.select([descriptor], [], [])
                continue
            raw += part
            if part:
                continue
            if raw or written or clock.monotonic() >= deadline:
                break
            clock.sleep(_POLL_SECONDS)
    finally:
        os.close(descriptor)
    if raw or written:
        _READ_ONCE[key] = raw
    elif key not in _READ_ONCE:
        message = "a pipe into which nobody writes"
        raise InvalidInputError([SourcePlace(str(path)).problem(message)])
    return _READ_ONCE[key]


def _unreadable(path: Path, error: OSError) -> Problem:
    from hpctrain.spec.fields import did_you_mean

    place = SourcePlace(str(path))
    if isinstance(error, FileNotFoundError):
        try:
            beside = [other.name for other in path.parent.iterdir() if other.is_file()]
        except OSError:
            beside = []
        hint = did_you_mean(path.name, beside)
        name = path.stem
        # Names of the packaged examples of one file, which `--help` names with their folder
        if hint is None and name in {example.stem for example in _EXAMPLES.glob("*.yaml")}:
            hint = f"`hpctrain examples {name} > {path.name}` writes the example of that name"
        return place.problem("no such file", hint)
    if isinstance(error, IsADirectoryError):
        return place.problem("is a directory", "give the YAML file inside it")
    return place.problem(f"cannot be read: {error.strerror or 'unknown reason'}")


def load_packaged(model: type[DocumentT], path: Path) -> DocumentT:
    """Read a packaged YAML document, from the JSON beside it if that is current.

    Parsing YAML with the place of every value takes longer than planning, and packaged documents
    need no places. The JSON holds a digest of the YAML text that it was made from; with another
    text it is ignored (see `packaged_json`). Both may lie in the archive of a run's code. Raises
    InvalidInputError for a fault of YAML, pydantic.ValidationError: faults of this package.
    """
    read: Callable[[str], bytes] = cast(Any, __spec__).loader.get_data  # PEP 302, also from a zip
    try:
        made = json.loads(read(str(path.with_suffix(".json"))))
        if made["yaml_sha256"] == hashlib.sha256(read(str(path))).hexdigest():
            return model.model_validate_json(json.dumps(made["values"]), strict=True)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    parsed = parse_yaml(read(str(path)).decode(), path.name)
    if parsed.problems:
        raise InvalidInputError(parsed.problems)
    return model.model_validate_json(json.dumps(parsed.data), strict=True)


def packaged_json(path: Path) -> str:
    """Return the text of the JSON that belongs beside a packaged YAML document."""
    raw = path.read_bytes()
    values = parse_yaml(raw.decode(), path.name).data
    made = {"yaml_sha256": hashlib.sha256(raw).hexdigest(), "values": values}
    return json.dumps(made, separators=(",", ":")) + "\n"
