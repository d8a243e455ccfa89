"""Keep the code of hpctrain with a run: one archive, from which its jobs import it.

An attempt starts days after `submit`, when another hpctrain may be installed. Belongs here: packing
what jobs import, and putting it into a run directory. Does not belong here: which archive the next
attempt takes (`hpctrain.records.kept_code`), moving a run to another one (`hpctrain.runs.control`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import marshal
import os
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType

from hpctrain.base.durable import make_private_directory, replace_bytes
from hpctrain.records.kept_code import archive_name, parse_archive_name, use_archive
from hpctrain.records.layout import RunLayout
from hpctrain.version import __version__

# The rooms that run inside of jobs; whatever they import outside of them fails there, and in tests.
_ROOMS = (
    *("base", "checkpoints", "data", "engines", "judge", "notify", "plan", "records", "serve"),
    *("slurm", "spec", "supervise", "tracking", "train", "trainer"),
    # what exports metrics from a job (`attempt_exporter`)
    *("diagnose", "job", "observe", "page", "runs", "telemetry"),
)
# Tables that a job reads (`observe.families`).
_TABLES = ("families.yaml", "families.json")
_INSIDE = "hpctrain/"
# importlib.util.MAGIC_NUMBER, flags 1 (hash-based, unchecked: PEP 552), then the source's hash.
_UNCHECKED = (1).to_bytes(4, "little")
# Of a compiled file beside its source: magic number, flags 0, time and size of the source.
_HEADER_BYTES = 16
# The earliest that an archive can have: the same code gives the same bytes.
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o444 << 16
_GIT_SECONDS = 30.0
# Archives that this process has found whole, by name and digest: unpacking one takes a third of a
# second, and a sweep submits a hundred runs of the same code.
_found_whole: set[tuple[str, bytes]] = set()


def keep_code(run: RunLayout) -> str:
    """Put the code of this hpctrain into the run, for its next attempt; return the archive's name.

    An archive is read-only and never changes: what an attempt has begun with stays. One that is
    damaged is written anew. Raises OSError.
    """
    package = Path(__file__).parents[1]
    # What changes with a module: its name, its time of change (ns) and its size (bytes)
    found = ((entry.path, entry.stat()) for entry in _entries(package))
    stamps = tuple(sorted((path, status.st_mtime_ns, status.st_size) for path, status in found))
    name = archive_name(__version__, _digest_of(package, stamps))
    make_private_directory(run.kept_software)  # beside a script that is no run's, too
    target = run.kept_software / name
    if not (target.exists() and _is_whole(target.read_bytes(), name)):
        replace_bytes(target, _archive(package, name), mode=0o600)
    use_archive(run, name)
    return name


def keep_checkout_changes(run: RunLayout, checkout: Path) -> None:
    """Keep what is not committed in the engine's checkout, new files too, where git can tell.

    The checkout stays as it is, with its index. Raises OSError.
    """
    # Who trains with a colleague's checkout runs its code anyway (git-config(1), safe.directory).
    git = ("git", "-C", str(checkout), "-c", f"safe.directory={checkout.resolve()}")
    with tempfile.TemporaryDirectory() as scratch:
        variables = {**os.environ, "GIT_INDEX_FILE": f"{scratch}/index"}
        found = None
        for words in (
            ("read-tree", "HEAD"),
            ("add", "--intent-to-add", "."),
            ("diff", "--binary", "HEAD"),
        ):
            try:
                found = subprocess.run(
                    [*git, *words],
                    capture_output=True,
                    timeout=_GIT_SECONDS,
                    check=False,
                    env=variables,
                )
            except (OSError, subprocess.TimeoutExpired):
                return
            if found.returncode != 0:
                return
    if found is not None and found.stdout:
        replace_bytes(run.checkout_changes, found.stdout, mode=0o600)


def _entries(package: Path) -> Iterator[os.DirEntry[str]]:
    """List the modules that jobs may import."""
    yield from _modules_in(package, deep=False)
    for room in _ROOMS:
        yield from _modules_in(package / room, deep=True)


def _modules_in(directory: Path | str, *, deep: bool) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".py") or entry.name in _TABLES:
                yield entry
            elif deep and entry.is_dir(follow_symlinks=False):
                yield from _modules_in(entry.path, deep=True)


def _texts(package: Path) -> Iterator[tuple[str, bytes]]:
    """Read the modules, by their paths in the package, in an order that is always the same."""
    for path in sorted(Path(entry.path) for entry in _entries(package)):
        yield path.relative_to(package).as_posix(), path.read_bytes()


@lru_cache(maxsize=1)
def _digest_of(package: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    """Read the code once per process, as long as it stays: a sweep submits a hundred runs."""
    return _digest(_texts(package))


def _digest(texts: Iterable[tuple[str, bytes]]) -> str:
    """Identify the code by its text, and by the Python that has compiled it (hex)."""
    found = hashlib.sha256((sys.implementation.cache_tag or "").encode())
    for path, text in texts:
        found.update(f"{path} {len(text)}\n".encode())
        found.update(text)
    return found.hexdigest()


def _is_whole(data: bytes, name: str) -> bool:
    """Whether an archive has the code of its name, every part as it was written."""
    these_bytes = (name, hashlib.sha256(data).digest())
    if these_bytes in _found_whole:
        return True
    parsed = parse_archive_name(name)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            texts = [
                (path.removeprefix(_INSIDE), archive.read(path))
                for path in archive.namelist()
                if path.endswith((".py", *_TABLES))
            ]
            whole = archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError):
        return False
    if whole and parsed is not None and name == archive_name(parsed[0], _digest(texts)):
        _found_whole.add(these_bytes)
        return True
    return False


def _archive(package: Path, name: str) -> bytes:
    """Pack the code, or take what an earlier submission has packed; the cache may be missing."""
    # the user's caches (XDG Base Directory Specification)
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    cached = home / "hpctrain" / name
    with contextlib.suppress(OSError):
        status = os.stat(cached)
        if status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            data = cached.read_bytes()
            if _is_whole(data, name):
                return data
    data = _packed(package, name)
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_bytes(cached, data, mode=0o600, durable=False)
        for old in cached.parent.glob("hpctrain-*.zip"):
            if old != cached:
                old.unlink(missing_ok=True)
    return data


def _packed(package: Path, name: str) -> bytes:
    """Make the archive: each module as text, and compiled, which Python does not keep of archives.

    Another Python than this one, of a container, ignores the compiled form and reads the text.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in _texts(package):
            inside = _INSIDE + path
            entries = {inside: text}
            if inside.endswith(".py"):
                compiled = _renamed(_compiled(package / path, text), f"{name}/{inside}")
                head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(text)
                entries[f"{inside}c"] = head + marshal.dumps(compiled)
            for entry, data in entries.items():
                info = zipfile.ZipInfo(entry, _TIME)
                info.external_attr, info.compress_type = _MODE, zipfile.ZIP_DEFLATED
                archive.writestr(info, data)
    return stream.getvalue()


def _compiled(path: Path, text: bytes) -> CodeType:
    """Compile a module, or read what Python has compiled of this very text."""
    if sys.implementation.cache_tag is None:  # a Python that keeps nothing compiled
        return compile(text, str(path), "exec", dont_inherit=True)
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        data = Path(importlib.util.cache_from_source(str(path))).read_bytes()
        status = os.stat(path)
        stamp = int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF
        head = b"".join(number.to_bytes(4, "little") for number in (0, *stamp))
        if data[:_HEADER_BYTES] == importlib.util.MAGIC_NUMBER + head:
            code = marshal.loads(data[_HEADER_BYTES:])
            if isinstance(code, CodeType):
                return code
    return compile(text, str(path), "exec", dont_inherit=True)


def _renamed(code: CodeType, name: str) -> CodeType:
    """Give code the name of its file in the archive: the installed one may be another by then."""
    constants = tuple(
        _renamed(one, name) if isinstance(one, CodeType) else one for one in code.co_consts
    )
    return code.replace(co_filename=name, co_consts=constants)
