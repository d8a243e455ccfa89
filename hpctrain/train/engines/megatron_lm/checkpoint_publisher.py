"""Publish what Megatron-LM has saved as checkpoints of the run.

Megatron-LM writes `iter_N` and then the tracker file into the directory that its arguments name.
That directory belongs to one launch (`saving_name`), so a stale launch writes where nobody reads.
Rank 0 sees the tracker change and renames the checkpoint to its partial name. From there it is
published like any other: digests of all ranks, manifest, fence, rename. Belongs here: these steps.
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

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.publish import (
    TRACKER_NAME,
    Retention,
    publish,
    published_steps,
)
from hpctrain.records.exit_records import rank_0_has_exited
from hpctrain.records.manifest import (
    DIGESTS_DIRECTORY,
    MANIFEST_NAME,
    FileDigest,
    Manifest,
    checkpoint_name,
    digest_file,
    partial_name,
    read_rank_digests,
    remove_rank_digests,
    saving_name,
    write_rank_digests,
)
from hpctrain.train.engines.megatron_lm.log_reporter import read_save_begun, read_save_done
from hpctrain.train.job import Job
from hpctrain.train.report import RecordFile
from hpctrain.train.saving.save_interval import save_record, steps_to_evaluate
from hpctrain.train.storage import fence_of, outlast, stale_or

# torch's file_system writer names a rank's files `__RANK_NUMBER.distcp`.
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
# Upper limit for the polls of the shared directory by all ranks together.
_POLLS_PER_SECOND = 200.0
_SHORTEST_POLL_SECONDS = 0.5
# Rank 0 computes the digests of other ranks itself after so long without a new one.
_DIGEST_TIMEOUT_SECONDS = 120.0
_DIGEST_TIMEOUT_AFTER_FAILURE_SECONDS = 5.0
# How long the end of a launch waits for old checkpoints to be deleted; the next launch continues.
_RETIRE_SECONDS = 10.0
# How long the end of a launch waits for its last checkpoint.
_DEADLINE_SECONDS = 1800.0


def poll_seconds(world_size: int) -> float:
    """Return the poll interval of one rank, so that thousands do not overload a file system."""
    return max(_SHORTEST_POLL_SECONDS, world_size / _POLLS_PER_SECOND)


class CheckpointPublisher:
    """A thread on each rank: rank 0 publishes, all others digest what they have written.

    `problem` is the error that has ended the thread, if any.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._root = job.run.checkpoints
        self._rows = RecordFile(job.run, job.run.saves)
        self.directory = self._root / saving_name(job.launch.epoch)
        self.problem: Exception | None = None
        self._digested: set[str] = set()
        self._seen_sizes: dict[str, list[tuple[str, int]]] = {}
        self._digest_timeout_seconds = _DIGEST_TIMEOUT_SECONDS
        self._began_at: dict[int, float] = {}
        self._stall_seconds: dict[int, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="saves", daemon=True)
        self._retiring: threading.Thread | None = None
        self._retention = Retention(self._root)

    @property
    def newest_step(self) -> int | None:
        """The step in the tracker of this launch; None before its first save."""
        try:
            return int((self.directory / TRACKER_NAME).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def start(self) -> None:
        if self._job.launch.leads:
            outlast(self._job.run, lambda: self._job.run.make_directory(self.directory))
        self._thread.start()

    def handle_line(self, text: str) -> None:
        """Measure from one line of rank 0's output how long a save stalls training."""
        begun, done = read_save_begun(text), read_save_done(text)
        if begun is not None:
            self._began_at[begun] = time.monotonic()
        if done is not None and done in self._began_at:
            # an asynchronous save prints it twice; training continued after the first time
            self._stall_seconds.setdefault(done, time.monotonic() - self._began_at[done])

    def finish(self) -> None:
        """Wait, after the program has ended without an error, until its last save is published.

        Raises the error that kept rank 0 from publishing; on other ranks CheckpointError if rank 0
        does not publish.
        """
        self._stop()
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while True:
            # without the run directory it would look as if everything were published
            outlast(self._job.run, self._job.run.require)
            given_up = self._rank_0_has_exited() or time.monotonic() > deadline
            if self._all_published():
                break
            self._work()
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

    def _rank_0_has_exited(self) -> bool:
        """Return whether rank 0 has left its exit record and cannot publish any more."""
        launch = self._job.launch
        return not launch.leads and rank_0_has_exited(self._job.run, launch.epoch)

    def abandon(self) -> None:
        """Publish, after the program has failed, earlier saves of which no file is missing."""
        self._digest_timeout_seconds = _DIGEST_TIMEOUT_AFTER_FAILURE_SECONDS
        self._stop()
        deadline = time.monotonic() + _DIGEST_TIMEOUT_AFTER_FAILURE_SECONDS
        while not self._all_published() and not self._rank_0_has_exited():
            if self.problem is not None:
                return
            self._work()
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _poll(self) -> None:
        pause_seconds = poll_seconds(self._job.launch.world_size)
        while not self._stopping.wait(pause_seconds):
            self._work()
            if self.problem is not None:
                _thread.interrupt_main()  # nothing that is trained from here on could be saved
                return

    def _work(self) -> None:
        work = self._publish_saved if self._job.launch.leads else self._digest_own
        try:
            outlast(self._job.run, work)
        except Exception as error:
            self.problem = stale_or(error, self._job.run, self._job.launch)

    def _all_published(self) -> bool:
        """Return whether no save is left; rank 0 deletes the launch's directory then."""
        newest = self.newest_step
        return newest is None or newest in published_steps(self._root)

    # -- rank 0 --------------------------------------------------------------------------------

    def _publish_saved(self) -> None:
        """Publish all saves up to the one that the tracker names, oldest first."""
        newest = self.newest_step
        if newest is None:
            return
        for step in published_steps(self.directory):
            if step > newest:
                continue
            source = self.directory / checkpoint_name(step)
            if not (source / "metadata.json").is_file():
                raise CheckpointError(
                    f"Megatron-LM reports that it saved {source.name}, but it is incomplete"
                )
            # Some versions add a tokenizer after they have moved the tracker: wait until no size
            # changes between two polls, or until the program has ended.
            sizes = [(name, (source / name).stat().st_size) for name in _files(source)]
            before, self._seen_sizes[source.name] = self._seen_sizes.get(source.name), sizes
            if self._stopping.is_set() or before == sizes:
                directory = self._root / partial_name(step, self._job.launch.epoch)
                os.rename(source, directory)
                self._finish_publishing(step, directory)

    def _finish_publishing(self, step: int, directory: Path) -> None:
        """Publish a save that has its partial name, with retries: no later poll would find it."""
        run, launch, config = self._job.run, self._job.launch, self._job.config
        manifest = outlast(run, lambda: self._manifest(step, directory))
        outlast(run, lambda: publish(self._root, manifest, fence_of(run, launch)))
        # 0 seconds if the program did not print when the save began
        now, stall_seconds = time.monotonic(), self._stall_seconds.pop(step, 0.0)
        publish_seconds = now - self._began_at.pop(step, now)
        self._rows.append(save_record(manifest, stall_seconds, publish_seconds))

        def retire_old(earlier: threading.Thread | None) -> None:
            """Delete digests of ranks and old checkpoints, after what an earlier save deletes.

            It takes seconds on a shared file system, in which the next save must be noticed.
            """
            if earlier is not None:
                earlier.join()
            remove_rank_digests(self._root / checkpoint_name(step))
            try:
                pinned = launch.pinned_steps | steps_to_evaluate(run)
            except OSError:
                return  # left to the next checkpoint
            self._retention.retire(config.keep_checkpoints, config.keep_every_steps, pinned)

        retiring = threading.Thread(
            target=retire_old, args=(self._retiring,), name="retire", daemon=True
        )
        self._retiring = retiring
        retiring.start()

    def _manifest(self, step: int, directory: Path) -> Manifest:
        """Collect the digests of all files: rank 0's own, other ranks', and missing ones."""
        names = _files(directory)
        others = {name for name in names if _owner(name) not in (0, None)}
        known = {name: digest_file(directory, name) for name in names if name not in others}
        known |= _wait_for_digests(directory, others, self._digest_timeout_seconds)
        known |= {name: digest_file(directory, name) for name in others if name not in known}
        files = {known[name]: _owner(name) or 0 for name in sorted(known)}
        return self._job.manifest(step, step * self._job.config.global_batch_size, files)

    # -- other ranks ---------------------------------------------------------------------------

    def _digest_own(self) -> None:
        """Write the digests of this rank's files in every save of this launch."""
        rank, epoch = self._job.launch.rank, self._job.launch.epoch
        for directory in self._root.glob(f"iter_*.partial-e{epoch:06d}"):
            if directory.name in self._digested:
                continue
            own = [name for name in _files(directory) if _owner(name) == rank]
            if own:
                write_rank_digests(directory, rank, own)
            self._digested.add(directory.name)


def _files(directory: Path) -> list[str]:
    """Return the names of all files of a checkpoint, without those that hpctrain adds."""
    names = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(
        str(name) for name in names if name.parts[0] not in (DIGESTS_DIRECTORY, MANIFEST_NAME)
    )


def _owner(name: str) -> int | None:
    """Return the rank that wrote a shard; None for all other files, which are rank 0's."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else None


def _wait_for_digests(
    directory: Path, names: set[str], timeout_seconds: float
) -> dict[str, FileDigest]:
    """Read the digests of other ranks until `names` are complete or no more arrive in time.

    Raises FileNotFoundError if the directory is removed, by a newer launch or by a fault.
    """
    known: dict[str, FileDigest] = {}
    progress_at = time.monotonic()
    while names - known.keys() and time.monotonic() - progress_at < timeout_seconds:
        digests = {file.name: file for file in read_rank_digests(directory) if file.name in names}
        if len(digests) > len(known):
            progress_at = time.monotonic()
        known = digests
        os.stat(directory)
        if names - known.keys():
            time.sleep(0.1)
    return known
