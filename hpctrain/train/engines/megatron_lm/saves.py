"""From what Megatron-LM has saved to checkpoints that count.

Megatron-LM writes `iter_N` and then the tracker file into the directory that it is given. That
directory belongs to one launch (`saving_name`), so a stale launch writes where nobody looks. Rank
0 sees the tracker move, renames the checkpoint to its partial name, and from there on it is
published like any other: digests of all ranks, manifest, fence, rename. Belongs here: that way.
Does not belong here: what makes a checkpoint good (see `hpctrain.checkpoints`).
"""

from __future__ import annotations

import _thread
import os
import re
import shutil
import threading
import time
from pathlib import Path

from hpctrain.checkpoints.manifest import (
    DIGESTS_DIRECTORY,
    MANIFEST_NAME,
    FileDigest,
    Manifest,
    checkpoint_name,
    digest_file,
    partial_name,
    read_rank_digests,
    saving_name,
    write_rank_digests,
)
from hpctrain.checkpoints.publish import (
    TRACKER_NAME,
    publish,
    published_steps,
    retire,
)
from hpctrain.errors import CheckpointError
from hpctrain.store.run_records import SaveRecord
from hpctrain.train.engines.megatron_lm.lines import read_saved, read_saving
from hpctrain.train.job import Job
from hpctrain.train.report import RecordFile
from hpctrain.train.storage import fence_of, outlast, stale_or

# torch's file_system writer names a rank's files `__RANK_NUMBER.distcp`.
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
# All ranks together look into the shared directory so many times a second.
_LOOKS_PER_SECOND = 200.0
_LEAST_LOOK_SECONDS = 0.5
# A rank that has digested nothing for so long will not do so any more.
_PATIENCE_SECONDS = 120.0
_PATIENCE_WITH_THE_DEAD_SECONDS = 5.0
# How long the end of a launch waits for old checkpoints to be deleted; the next launch goes on.
_RETIRE_SECONDS = 10.0
# How long the end of a launch waits for its last checkpoint.
_DEADLINE_SECONDS = 1800.0


def look_seconds(world_size: int) -> float:
    """Between two looks of one rank: thousands of ranks must not wear out a file system."""
    return max(_LEAST_LOOK_SECONDS, world_size / _LOOKS_PER_SECOND)


class Saves:
    """A thread on each rank: rank 0 publishes, all others digest what they have written."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._root = job.run.checkpoints
        self._rows = RecordFile(job.run, job.run.saves)
        self.directory = self._root / saving_name(job.launch.epoch)
        self.problem: Exception | None = None
        self._digested: set[str] = set()
        self._seen: dict[str, list[tuple[str, int]]] = {}
        self._patience_seconds = _PATIENCE_SECONDS
        self._stalls = _Stalls()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saves", daemon=True)
        self._retiring: threading.Thread | None = None

    @property
    def newest_step(self) -> int | None:
        """The step that Megatron-LM has saved last in this launch."""
        return self._newest_saved()

    def start(self) -> None:
        if self._job.launch.leads:
            outlast(self._job.run, lambda: self._job.run.make_directory(self.directory))
        self._thread.start()

    def hear(self, text: str) -> None:
        """One line of rank 0's output: how long a save holds up training."""
        self._stalls.hear(text)

    def finish(self) -> None:
        """The program has ended well: return when its last checkpoint counts.

        Raises whatever kept rank 0 from publishing; CheckpointError when nothing comes of it.
        """
        self._stop()
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while True:
            outlast(self._job.run, self._job.run.require)  # else nothing seems to be left to do
            given_up = self._given_up() or time.monotonic() > deadline
            if self._all_published():
                break
            self._look()
            if self.problem is not None:
                raise self.problem
            if given_up:
                raise CheckpointError(f"rank 0 did not publish what {self.directory} holds")
            time.sleep(0.1)
        if self._job.launch.leads:
            self._rows.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            if self._retiring is not None:
                self._retiring.join(_RETIRE_SECONDS)

    def _given_up(self) -> bool:
        """Rank 0 leaves a record when it ends, and cannot publish any more then."""
        record = self._job.run.exit_record(self._job.launch.epoch, 0)
        return not self._job.launch.leads and record.exists()

    def abandon(self) -> None:
        """The program has failed: what it had saved before still counts, if nothing is missing."""
        self._patience_seconds = _PATIENCE_WITH_THE_DEAD_SECONDS
        self._stop()
        deadline = time.monotonic() + _PATIENCE_WITH_THE_DEAD_SECONDS
        while not self._all_published() and not self._given_up():
            if self.problem is not None or time.monotonic() > deadline:
                return
            self._look()
            time.sleep(0.1)

    def _stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        pause = look_seconds(self._job.launch.world_size)
        while not self._over.wait(pause):
            self._look()
            if self.problem is not None:
                _thread.interrupt_main()  # training on would be training for nothing
                return

    def _look(self) -> None:
        work = self._publish_saved if self._job.launch.leads else self._digest_own
        try:
            outlast(self._job.run, work)
        except Exception as error:
            self.problem = stale_or(error, self._job.run, self._job.launch)

    def _newest_saved(self) -> int | None:
        """What the tracker of this launch names; None before its first save."""
        try:
            return int((self.directory / TRACKER_NAME).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _all_published(self) -> bool:
        """Rank 0 takes the launch's directory away when nothing is left to do."""
        newest = self._newest_saved()
        return newest is None or newest in published_steps(self._root)

    # -- rank 0 --------------------------------------------------------------------------------

    def _publish_saved(self) -> None:
        """All that lies there up to what the tracker names, the oldest first."""
        newest = self._newest_saved()
        if newest is None:
            return
        for step in published_steps(self.directory):
            if step <= newest:
                self._publish(step)

    def _publish(self, step: int) -> None:
        source = self.directory / checkpoint_name(step)
        if not (source / "metadata.json").is_file():
            raise CheckpointError(f"Megatron-LM says that it saved {source.name}: it is incomplete")
        if not self._is_quiet(source):
            return
        directory = self._root / partial_name(step, self._job.launch.epoch)
        os.rename(source, directory)
        self._finish_publishing(step, directory)

    def _finish_publishing(self, step: int, directory: Path) -> None:
        """Once it has its partial name nobody else looks for it, so this is done to the end."""
        run, launch = self._job.run, self._job.launch
        manifest = outlast(run, lambda: self._manifest(step, directory))
        outlast(run, lambda: publish(self._root, manifest, fence_of(run, launch)))
        self._rows.append(self._stalls.record(manifest))
        retiring = threading.Thread(
            target=self._retire, args=(self._retiring,), name="retire", daemon=True
        )
        self._retiring = retiring
        retiring.start()

    def _retire(self, earlier: threading.Thread | None) -> None:
        """Delete old checkpoints, after the deletion that an earlier one has begun: seconds on a
        shared file system, in which the next save must be seen."""
        if earlier is not None:
            earlier.join()
        config, pinned = self._job.config, self._job.launch.pinned_steps
        retire(self._root, config.keep_checkpoints, config.keep_every_steps, pinned)

    def _is_quiet(self, source: Path) -> bool:
        """Nothing has changed since the last look: some versions add a tokenizer after they have
        moved the tracker. Nothing is added once the program has ended."""
        before, self._seen[source.name] = self._seen.get(source.name), _sizes(source)
        return self._over.is_set() or before == self._seen[source.name]

    def _manifest(self, step: int, directory: Path) -> Manifest:
        config = self._job.config
        files = self._all_digests(directory)
        return Manifest(
            step=step,
            epoch=self._job.launch.epoch,
            engine=config.engine,
            layout=config.layout_words,
            world_size=self._job.launch.world_size,
            consumed_samples=step * config.global_batch_size,
            time=time.time(),
            writers=tuple(_owner(file.name) or 0 for file in files),
            files=files,
        )

    def _all_digests(self, directory: Path) -> tuple[FileDigest, ...]:
        """Of all files: rank 0's own, those of other ranks, and what nobody else has digested."""
        names = _files(directory)
        others = {name for name in names if _owner(name) not in (0, None)}
        known = {name: digest_file(directory, name) for name in names if name not in others}
        known |= _awaited(directory, others, self._patience_seconds)
        known |= {name: digest_file(directory, name) for name in others if name not in known}
        return tuple(known[name] for name in sorted(known))

    # -- other ranks ---------------------------------------------------------------------------

    def _digest_own(self) -> None:
        rank, epoch = self._job.launch.rank, self._job.launch.epoch
        for directory in self._root.glob(f"iter_*.partial-e{epoch:06d}"):
            if directory.name in self._digested:
                continue
            own = [name for name in _files(directory) if _owner(name) == rank]
            if own:
                write_rank_digests(directory, rank, own)
            self._digested.add(directory.name)


class _Stalls:
    """When saves began to hold up training, and when they ceased to."""

    def __init__(self) -> None:
        self._began_at: dict[int, float] = {}
        self._seconds: dict[int, float] = {}

    def hear(self, text: str) -> None:
        began, saved = read_saving(text), read_saved(text)
        if began is not None:
            self._began_at[began] = time.monotonic()
        if saved is not None and saved in self._began_at:
            # an asynchronous save says so twice; training went on after the first time
            self._seconds.setdefault(saved, time.monotonic() - self._began_at[saved])

    def record(self, manifest: Manifest) -> SaveRecord:
        """0 where the program has not said when it began."""
        step, now = manifest.step, time.monotonic()
        return SaveRecord(
            step=step,
            epoch=manifest.epoch,
            time=time.time(),
            stall_seconds=self._seconds.pop(step, 0.0),
            publish_seconds=now - self._began_at.pop(step, now),
            size_bytes=manifest.total_bytes,
        )


def _files(directory: Path) -> list[str]:
    """Names of all files of a checkpoint, without what hpctrain adds."""
    names = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(
        str(name) for name in names if name.parts[0] not in (DIGESTS_DIRECTORY, MANIFEST_NAME)
    )


def _sizes(directory: Path) -> list[tuple[str, int]]:
    return [(name, (directory / name).stat().st_size) for name in _files(directory)]


def _owner(name: str) -> int | None:
    """The rank that wrote a shard; None for all other files, which are rank 0's."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else None


def _awaited(directory: Path, names: set[str], patience_seconds: float) -> dict[str, FileDigest]:
    """What other ranks digest, until that is all of `names` or nothing more comes.

    Raises FileNotFoundError when the directory is taken away, by a newer launch or by a fault.
    """
    known: dict[str, FileDigest] = {}
    progress_at = time.monotonic()
    while names - known.keys() and time.monotonic() - progress_at < patience_seconds:
        found = {file.name: file for file in read_rank_digests(directory) if file.name in names}
        if len(found) > len(known):
            progress_at = time.monotonic()
        known = found
        os.stat(directory)
        if names - known.keys():
            time.sleep(0.1)
    return known
