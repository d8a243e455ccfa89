"""Find checkpoints of a trainer of one's own, tell when one is complete, and publish it.

The trainer writes into the directory of its launch, and keeps, rotates and deletes there as it
likes. A checkpoint that is complete by the rules of the spec, and whose files stand still, is
linked (link(2); copied where that cannot be) to `checkpoints/iter_N` under its own name, and from
there on is like any other. So a trainer that is killed while it writes, or that deletes its last
good checkpoint, takes nothing of that away. Nothing in a file is executed: pickles are scanned for
the names in them. Belongs here: these steps. Does not belong here: when they are taken
(`hpctrain.trainer`, `hpctrain.supervise`), the fields of the rules (`hpctrain.spec.trainer`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickletools
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from hpctrain.base import clock
from hpctrain.checkpoints.discover import AUTO_DEEP_LIMIT_BYTES
from hpctrain.checkpoints.publish import Fence, publish, published_steps, quarantined
from hpctrain.records.epochs import current_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import (
    DIGESTS_DIRECTORY,
    MANIFEST_NAME,
    Manifest,
    checkpoint_name,
    digest_file,
    partial_name,
)
from hpctrain.spec.trainer import CompleteSpec, ForeignCheckpointSpec, TrainerSpec

# A safetensors file begins with the length of its header in 8 bytes (format of safetensors); of
# more than 100 MB the library itself reads none.
_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
# The record at the end of a zip archive, before a comment of at most 65535 bytes (APPNOTE 4.3.16).
_ZIP_END, _ZIP_END_BYTES = b"PK\x05\x06", 22 + 65535
# torch.distributed.checkpoint names its files `__RANK_NUMBER.distcp` (filesystem.py).
_DCP_FILE = re.compile(r"__\d+_\d+\.distcp")
_METADATA = ".metadata"
# A name with one of these may mean several files.
_GLOB = frozenset("*?[")


# Of each file its name, size (bytes) and time of change (ns).
Sizes = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Found:
    """A checkpoint in the directory of a launch: its step and its path."""

    step: int
    path: Path

    def sizes(self) -> Sizes:
        """Ask for each file, to see whether they stand still. Raises FileNotFoundError."""
        return tuple(
            (name, status.st_size, status.st_mtime_ns)
            for name, status in ((one, os.stat(self.path / one)) for one in self.files())
        )

    def files(self) -> tuple[str, ...]:
        """The names of its files, relative to it; of a checkpoint that is a file, `.`."""
        if self.path.is_file():
            return (".",)
        names = (one.relative_to(self.path) for one in self.path.rglob("*") if one.is_file())
        return tuple(sorted(map(str, names)))


def find_checkpoints(output: Path, spec: ForeignCheckpointSpec) -> list[Found]:
    """List what has the name of a checkpoint, by steps, ascending. Raises OSError."""
    root = Path(output, spec.path)  # an absolute one is its own
    pattern = _name_pattern(root.name)
    fixed = Path(*takewhile(_GLOB.isdisjoint, root.parent.parts))
    directories, rest = [fixed], str(root.parent.relative_to(fixed))
    if rest != ".":  # all directories that a path with `*` in it may mean
        directories = sorted(one for one in fixed.glob(rest) if one.is_dir())
    found = []
    for directory in directories:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(directory):
                match = pattern.fullmatch(name)
                if match is not None:
                    found.append(Found(int(match["step"]), directory / name))
    return sorted(found, key=lambda one: (one.step, one.path))


def _name_pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(\{step\}|\*|\?)", name)
    known = {"{step}": r"0*(?P<step>\d+)", "*": ".*?", "?": "."}
    return re.compile("".join(known.get(part, re.escape(part)) for part in parts))


# -- Complete or not ---------------------------------------------------------------------------


def what_is_missing(found: Found, rules: CompleteSpec, output: Path, ranks: int) -> str | None:
    """Return the first rule that a checkpoint does not meet; None if it is complete.

    `ranks`: how many write to it. Files that vanish meanwhile are missing.
    """
    try:
        return next(_missing(found, rules, output, ranks), None)
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is gone"


def _missing(found: Found, rules: CompleteSpec, output: Path, ranks: int) -> Iterator[str]:
    files = found.files()
    if not files:
        yield "it is empty"
    for pattern in rules.files:
        if not _matching(found, pattern, files):
            yield f"{pattern} is not there"
    for pattern in rules.absent:
        if _matching(found, pattern, files):
            yield f"{pattern} is still there"
    for pattern in rules.each_rank if ranks > 1 else ():
        for rank in range(ranks):
            name = pattern.replace("{rank}", str(rank))
            if not _matching(found, name, files):
                yield f"{name} is not there"
    checks: tuple[tuple[tuple[str, ...], Callable[[Path], bool], str], ...] = (
        (rules.json_files, _is_json, "no whole JSON"),
        (rules.safetensors, _is_whole_safetensors, "shorter than its header says"),
        (rules.zip, _is_whole_zip, "without its end"),
    )
    for patterns, is_whole, words in checks:
        for pattern in patterns:
            named = _matching(found, pattern, files)
            if not named:
                yield f"{pattern} is not there"
            for name in named:
                if not is_whole(found.path / name if name != "." else found.path):
                    yield f"{name} is {words}"
    if rules.dcp:
        yield from _missing_shards(found, files)
    if rules.tracker is not None:
        yield from _behind_tracker(found, output / rules.tracker.file, rules.tracker.text)


def _matching(found: Found, pattern: str, files: tuple[str, ...]) -> list[str]:
    if pattern == ".":
        return ["."] if found.path.is_file() else []
    if _GLOB.isdisjoint(pattern):
        return [pattern] if pattern in files else []
    return [name for name in files if Path(name).match(pattern)]


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def _is_whole_safetensors(path: Path) -> bool:
    """Compare the size with the end of the last tensor (`data_offsets` of the header)."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack(head)
        if length > min(_MOST_HEADER_BYTES, size - _LENGTH.size):
            return False
        try:
            header = json.loads(stream.read(length))
            ends = [of["data_offsets"][1] for name, of in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return False
    return bool(size == _LENGTH.size + length + max(ends, default=0))


def _is_whole_zip(path: Path) -> bool:
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _ZIP_END_BYTES))
        end = stream.read()
    at = end.rfind(_ZIP_END)
    if at < 0 or len(end) - at < 22:
        return False
    return len(end) - at == 22 + int.from_bytes(end[at + 20 : at + 22], "little")


def _missing_shards(found: Found, files: tuple[str, ...]) -> Iterator[str]:
    """Find files that the metadata of torch.distributed.checkpoint names and that are missing."""
    if _METADATA not in files:
        yield f"{_METADATA} is not there"
        return
    named = set()
    try:
        for operation, value, _ in pickletools.genops((found.path / _METADATA).read_bytes()):
            if (
                "UNICODE" in operation.name
                and isinstance(value, str)
                and _DCP_FILE.fullmatch(value)
            ):
                named.add(value)
    except ValueError:
        yield f"{_METADATA} is not whole"
    yield from (f"{name} is not there" for name in sorted(named - {*files}))


def _behind_tracker(found: Found, tracker: Path, text: str) -> Iterator[str]:
    try:
        said = tracker.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        yield f"{tracker.name} is not there"
        return
    match = _name_pattern(text).fullmatch(said)
    if match is None or int(match["step"]) < found.step:
        yield f"{tracker.name} names no step {found.step}"


# -- Into the checkpoints of the run -------------------------------------------------------------


def link_checkpoint(found: Found, directory: Path) -> list[str]:
    """Link the files of a checkpoint below `directory`, under its own name; return their names.

    Up to 1 GiB it is copied, which takes a second: a trainer may write the same step once more,
    over its files, and a link would show that. What an earlier call has left there is replaced.
    Raises OSError.
    """
    shutil.rmtree(directory, ignore_errors=True)
    copies = sum(size for _, size, _ in found.sizes()) <= AUTO_DEEP_LIMIT_BYTES
    names = []
    for name in found.files():
        source = found.path if name == "." else found.path / name
        inside = Path(found.path.name) if name == "." else Path(found.path.name, name)
        target = directory / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        if copies:
            shutil.copy2(source, target)
        else:
            _link(source, target)
        names.append(str(inside))
    return names


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        # another file system, or one without hard links
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EACCES):
            raise
        shutil.copy2(source, target)


def own_name(directory: Path) -> str | None:
    """Return the name that its trainer gave to a published checkpoint; None if there is none."""
    own = (DIGESTS_DIRECTORY, MANIFEST_NAME)
    names = [name for name in sorted(os.listdir(directory)) if name not in own]
    return names[0] if len(names) == 1 else None


def put_back(root: Path, step: int, output: Path, spec: ForeignCheckpointSpec) -> None:
    """Put a published checkpoint where its trainer looks for its newest one, with its tracker.

    Raises OSError.
    """
    published = root / checkpoint_name(step)
    name = own_name(published)
    if name is None:
        raise FileNotFoundError(errno.ENOENT, "no checkpoint of a trainer", str(published))
    at = Path(output, spec.path).parent / name
    for path in sorted((published / name).rglob("*")) or [published / name]:
        if path.is_file():
            target = at / path.relative_to(published / name) if path != published / name else at
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                _link(path, target)
    tracker = spec.complete.tracker
    if tracker is not None:
        (output / tracker.file).write_text(tracker.text.replace("{step}", str(step)))


def unpublished(root: Path, found: list[Found]) -> list[Found]:
    """Select those that are newer than every published checkpoint, ascending."""
    newest = max(published_steps(root), default=-1)
    return [one for one in found if one.step > newest]


# -- What a launch has left behind ----------------------------------------------------------------


@dataclass(frozen=True)
class EndedLaunch:
    """A launch that writes no more: its directory, its number, how many ranks it had, and the step
    that it had resumed from (0: none)."""

    output: Path
    epoch: int
    ranks: int
    resume_step: int


def publish_left(
    run: RunLayout, epoch: int, trainer: TrainerSpec, launches: Iterable[EndedLaunch]
) -> Iterator[str]:
    """Publish complete checkpoints that earlier launches have left unpublished, oldest first.

    An agent that was killed has left them. Their ranks write elsewhere than the next launch reads,
    and what is complete is not written any more. What was given up stays so, with all that the same
    launch has trained on from it. `epoch`: of the launch that begins. Yields a sentence about each
    checkpoint. Raises OSError.
    """
    spec = trainer.checkpoint
    if spec is None or not spec.complete.says_when:
        return  # without a rule, nobody knows of what a failure has left
    given_up = quarantined(run.checkpoints)
    for launch in sorted(launches, key=lambda one: one.epoch):
        for found in unpublished(run.checkpoints, find_checkpoints(launch.output, spec)):
            if any(step <= found.step and launch.epoch <= by for step, by in given_up):
                continue
            if found.step <= launch.resume_step:
                continue  # put there for it to resume from, and given up since
            missing = what_is_missing(found, spec.complete, launch.output, launch.ranks)
            if missing is not None:
                yield f"{launch.output.name}/{found.path.name} is not complete: {missing}"
                continue
            partial = run.checkpoints / partial_name(found.step, epoch)
            names = link_checkpoint(found, partial)
            manifest = Manifest(
                step=found.step,
                epoch=epoch,
                engine="trainer",
                layout=layout_words(trainer, launch.ranks),
                world_size=launch.ranks,
                consumed_samples=None,
                time=clock.now(),
                files=tuple(digest_file(partial, name) for name in sorted(names)),
            )
            publish(run.checkpoints, manifest, Fence(epoch, lambda: current_epoch(run.epochs)))
            yield f"published {found.path.name}, which {launch.output.name} had left complete"


def layout_words(trainer: TrainerSpec, ranks: int) -> str:
    """Describe who wrote a checkpoint, for its manifest."""
    return f"{trainer.framework or 'trainer'} · {ranks} ranks"
