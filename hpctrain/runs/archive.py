"""Packs a run into one tar file with the digest of its content and a listing.

    tar xf RUN_ID.tar.gz -C RUNS        brings the run back, for `status`, `describe` and the like

Weights are left out unless they are asked for; manifests of checkpoints are always in it. Belongs
here: what goes into the file, writing and checking it. Does not belong here: packing logs of a live
run (`hpctrain.records.old_launches`), removing the run (`clean`).
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.durable import fsync_file
from hpctrain.base.errors import UsageError
from hpctrain.checkpoints.discover import checkpoints
from hpctrain.checkpoints.publish import TRACKER_NAME
from hpctrain.job.job_queries import why_in_use
from hpctrain.records.find import RunFiles
from hpctrain.records.manifest import MANIFEST_NAME
from hpctrain.slurm.client import SlurmClient
from hpctrain.version import __version__

LISTING_NAME = "archive.json"
WithCheckpoints = Literal["last", "none", "all"]
_READ_BYTES = 1 << 20


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ArchivedFile(_Model):
    """One file; `sha256` is of its content, of a link of the text that it points to."""

    name: str
    size_bytes: int
    sha256: str
    link: bool = False


class ArchiveListing(_Model):
    """`archive.json`, the last file of an archive.

    `packed_at` is in seconds since the epoch. `content_sha256` is over the lines `SHA256 SIZE NAME`
    of all files in the order of names. Left out are weights, and `special_files`, which are neither
    files nor links.
    """

    schema_version: Literal[1] = 1
    run_id: str
    version: str
    packed_at: float
    checkpoints: WithCheckpoints
    left_out_files: int
    left_out_bytes: int
    special_files: tuple[str, ...]
    content_sha256: str
    files: tuple[ArchivedFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Archived:
    """An archive that has been written and read back."""

    path: Path
    archive_bytes: int
    listing: ArchiveListing


def default_output(run: RunFiles, with_checkpoints: WithCheckpoints) -> Path:
    """Choose a name in the current directory; weights are not compressed, they hardly shrink."""
    suffix = ".tar.gz" if with_checkpoints == "none" else ".tar"
    return Path(f"{run.run_id}{suffix}")


def archive(
    run: RunFiles, slurm: SlurmClient, output: Path, with_checkpoints: WithCheckpoints = "none"
) -> Archived:
    """Write the archive, for its owner only, read it back and compare every file.

    It is compressed if its name ends with `.gz` or `.tgz`. Raises UsageError for a run that has a
    job, for an output that exists or lies in the run, and for what cannot be read or written;
    SlurmUnreachableError when nobody can tell whether the run has a job.
    """
    directory = run.layout.directory
    if not run.layout.done.exists():
        job = why_in_use(run, slurm)
        if job is not None:
            raise UsageError(
                f"run `{run.run_id}` cannot be archived: {job}, and its files change",
                hint=f"`{run.command('stop')}` makes it save and stop",
            )
    if directory.resolve() in output.resolve().parents:
        raise UsageError(f"{output} lies in the run that is to be archived")
    try:
        # private, as the run directory is
        with open(output, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as raw:
            try:
                listing = _write(
                    run, raw, with_checkpoints, compressed=output.suffix in (".gz", ".tgz")
                )
                raw.flush()
                os.fsync(raw.fileno())
                _compare(output, listing)
            except BaseException:
                output.unlink(missing_ok=True)
                raise
        fsync_file(output)
    except FileExistsError as error:
        raise UsageError(f"{output} exists already", hint="`--output FILE`") from error
    except OSError as error:
        raise UsageError(f"run `{run.run_id}` cannot be archived: {error}") from error
    return Archived(output, output.stat().st_size, listing)


def _write(
    run: RunFiles, raw: IO[bytes], with_checkpoints: WithCheckpoints, *, compressed: bool
) -> ArchiveListing:
    root = run.layout.directory
    wanted = _wanted_checkpoints(run, with_checkpoints)
    files: list[ArchivedFile] = []
    special: list[str] = []
    left_out_files = left_out_bytes = 0
    mode: Literal["w:gz", "w"] = "w:gz" if compressed else "w"
    with tarfile.open(fileobj=raw, mode=mode) as tar:
        tar.add(root, arcname=run.run_id, recursive=False)
        for path in _paths(root):
            name = str(path.relative_to(root))
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                if not _is_weights(path / MANIFEST_NAME, run, wanted):
                    tar.add(path, arcname=f"{run.run_id}/{name}", recursive=False)
            elif not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                special.append(name)
            elif name == LISTING_NAME:
                continue  # of the archive that this run came from
            elif _is_weights(path, run, wanted):
                left_out_files += 1
                left_out_bytes += status.st_size
            else:
                files.append(_add(tar, path, f"{run.run_id}/{name}", name))
        files.sort(key=lambda file: file.name)
        lines = (f"{file.sha256} {file.size_bytes} {file.name}" for file in files)
        listing = ArchiveListing(
            run_id=run.run_id,
            version=__version__,
            packed_at=clock.now(),
            checkpoints=with_checkpoints,
            left_out_files=left_out_files,
            left_out_bytes=left_out_bytes,
            special_files=tuple(special),
            content_sha256=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            files=tuple(files),
        )
        text = listing.model_dump_json(indent=1).encode()
        member = tarfile.TarInfo(f"{run.run_id}/{LISTING_NAME}")
        member.size, member.mtime, member.mode = len(text), int(listing.packed_at), 0o600
        tar.addfile(member, io.BytesIO(text))
    return listing


def _paths(root: Path) -> Iterator[Path]:
    """Yield everything below the run, a directory before what is in it; nothing behind links."""
    with os.scandir(root) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _paths(Path(entry.path))


def _wanted_checkpoints(run: RunFiles, which: WithCheckpoints) -> frozenset[Path] | None:
    """Choose the checkpoints whose weights go into the archive; None for all."""
    if which == "all":
        return None
    if which == "none":
        return frozenset()
    good = next((one for one in checkpoints(run.layout.checkpoints) if one.good), None)
    if good is None:
        raise UsageError(
            f"run `{run.run_id}` has no good checkpoint to archive",
            hint=f"`{run.command('checkpoints')}`; `--with-checkpoints none` goes without",
        )
    return frozenset({good.directory})


def _is_weights(path: Path, run: RunFiles, wanted: frozenset[Path] | None) -> bool:
    """True for a file of a checkpoint that is not wanted; manifests and reasons always are."""
    root = run.layout.checkpoints
    if wanted is None or root not in path.parents:
        return False
    if any(parent in wanted for parent in path.parents):
        return False
    return path.name not in (MANIFEST_NAME, TRACKER_NAME) and path.suffix != ".reason"


def _add(tar: tarfile.TarFile, path: Path, arcname: str, name: str) -> ArchivedFile:
    """Add one file or link and digest what was added. Raises OSError, also if it has changed."""
    if path.is_symlink():
        target = os.readlink(path)
        tar.add(path, arcname=arcname, recursive=False)
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()
        return ArchivedFile(name=name, size_bytes=0, sha256=digest, link=True)
    with path.open("rb") as stream:
        member = tar.gettarinfo(arcname=arcname, fileobj=stream)
        member.type = tarfile.REGTYPE  # a second hard link is a file of its own
        reader = _Digesting(stream)
        tar.addfile(member, reader)
    return ArchivedFile(name=name, size_bytes=member.size, sha256=reader.sha256.hexdigest())


class _Digesting(io.RawIOBase):
    """A stream that digests what is read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.sha256.update(data)
        return data


def _compare(path: Path, listing: ArchiveListing) -> None:
    """Read the archive back. Raises OSError if a file in it is not as it was added."""
    expected = {f"{listing.run_id}/{file.name}": file for file in listing.files}
    with tarfile.open(path, mode="r:*") as tar:
        for member in tar:
            file = expected.pop(member.name, None)
            if file is None:
                continue
            sha256 = hashlib.sha256()
            if file.link:
                sha256.update(os.fsencode(member.linkname))
            elif (stream := tar.extractfile(member)) is not None:
                while block := stream.read(_READ_BYTES):
                    sha256.update(block)
            if sha256.hexdigest() != file.sha256:
                raise OSError(f"{file.name} is not in {path} as it was read")
    if expected:
        raise OSError(f"{next(iter(expected))} is not in {path}")
